"""Feeds of the console: differences, bounded queues, and reading only while a page is open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.domain.console_view import View, difference
from services.gateway.http.console import feed as feed_module
from services.gateway.http.console.feed import Feed, Subscription
from shared.errors import QueueFull, Unreachable

VIEWS = st.dictionaries(
    st.sampled_from(("models", "nodes")),
    st.dictionaries(st.sampled_from("abc"), st.fixed_dictionaries({"state": st.sampled_from(("ready", "cold"))})),
)


@given(VIEWS, VIEWS)
def test_difference_turns_one_view_into_the_other(before: View, after: View) -> None:
    found = difference(before, after)
    for section in before.keys() | after.keys():
        records = {**before.get(section, {}), **found.get(section, {})}
        assert {key: record for key, record in records.items() if record is not None} == after.get(section, {})
    assert difference(after, after) == {}


class Source:
    """A view that a test changes; each reading can be awaited."""

    def __init__(self) -> None:
        self.view: View = {"models": {}}
        self.error: Exception | None = None
        self.read_once = asyncio.Event()

    async def read(self) -> Callable[[], View]:
        self.read_once.set()
        if self.error is not None:
            raise self.error
        view = {section: dict(records) for section, records in self.view.items()}
        return lambda: view


class Reader:
    """A page: its views as a client keeps them."""

    def __init__(self, feed: Feed) -> None:
        self.page, self.closing = Subscription(), asyncio.Event()
        self._feed = feed
        self.view: View = {}
        self.events: list[dict[str, Any]] = []

    async def next(self) -> dict[str, Any]:
        """Apply the next event."""
        async with asyncio.timeout(60):
            async for raw in self._stream:
                if raw.startswith(b":"):
                    continue
                topic, data = raw.decode().split("\n")[:2]
                assert topic == "event: models"
                event: dict[str, Any] = json.loads(data.removeprefix("data: "))
                self._apply(event)
                return event
        raise AssertionError("the stream has ended")

    def _apply(self, event: dict[str, Any]) -> None:
        if "view" in event:
            self.view = event["view"]
        for section, records in event.get("changes", {}).items():
            merged = {**self.view.get(section, {}), **records}
            self.view[section] = {key: record for key, record in merged.items() if record is not None}

    async def __aenter__(self) -> Reader:
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(self._feed.subscribed(self.page))
        self._stream = self.page.events(self.closing)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.aclose()
        self._exit.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "INTERVAL_S", 0.0)
    monkeypatch.setattr(feed_module, "_COST_FACTOR", 0.0)


@pytest.mark.usefixtures("quick")
async def test_a_page_gets_the_whole_view_and_then_changes() -> None:
    source = Source()
    source.view = {"models": {"a": {"n": 1}, "b": {"n": 1}}}
    async with Reader(Feed("models", source.read)) as reader:
        assert "view" in await reader.next()
        source.view = {"models": {"a": {"n": 2}}}
        assert (await reader.next())["changes"] == {"models": {"a": {"n": 2}, "b": None}}
        source.error = Unreachable("no leader")
        assert (await reader.next())["error"] == "no leader"
        source.error = None
        assert (await reader.next())["error"] is None
        assert reader.view == source.view


@pytest.mark.usefixtures("quick")
async def test_a_page_that_does_not_read_gets_the_whole_view_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_KEEP_ALIVE_S", 600.0)  # only the overflow wakes the page
    source = Source()
    feed = Feed("models", source.read)
    async with Reader(feed) as slow, Reader(feed) as prompt:
        await slow.next()
        await prompt.next()
        for n in range(40):  # more than a queue holds
            source.view = {"models": {"a": {"n": n}}}
            await prompt.next()
        assert "view" in await slow.next()
        assert slow.view == prompt.view == source.view


@pytest.mark.usefixtures("quick")
async def test_nothing_is_read_without_a_page() -> None:
    source = Source()
    feed = Feed("models", source.read)
    async with Reader(feed) as reader:
        await reader.next()
    source.read_once.clear()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not source.read_once.is_set()
    async with Reader(feed) as reader:
        assert "view" in await reader.next()


async def test_a_costly_view_is_read_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause is a hundred times the processor time of the last reading, at least a second."""
    pauses: list[float] = []
    slept = asyncio.Event()
    others_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        task = asyncio.current_task()
        if task is None or task.get_name() != "console models":  # of an earlier test, in another thread
            await others_sleep(seconds)
            return
        pauses.append(seconds)
        slept.set()
        await asyncio.Event().wait()

    def compute() -> View:
        started = time.thread_time()
        while time.thread_time() - started < 0.05:
            pass
        return {}

    async def read() -> Callable[[], View]:
        return compute

    feed = Feed("models", read)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with feed.subscribed(Subscription()):
        await asyncio.wait_for(slept.wait(), 60)
    assert pauses[0] >= 5.0


@pytest.mark.usefixtures("quick")
async def test_stream_ends_with_the_gateway() -> None:
    async with Reader(Feed("models", Source().read)) as reader:
        await reader.next()
        reader.closing.set()
        assert [event async for event in reader._stream if not event.startswith(b"event")] == []


async def test_pages_are_bounded() -> None:
    feed = Feed("models", Source().read)
    with contextlib.ExitStack() as pages:
        for _ in range(64):
            feed.require_room()
            pages.enter_context(feed.subscribed(Subscription()))
        with pytest.raises(QueueFull):
            feed.require_room()
    feed.require_room()
