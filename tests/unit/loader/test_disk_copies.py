"""Downloads to the disk that several calls wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

import pytest

from services.loader.adapters.cache_fill import CacheFill
from services.loader.adapters.disk_copies import DiskCopies
from services.loader.adapters.run import Threads
from services.loader.adapters.runs import Runs
from services.loader.domain.effects import StartRun
from shared.contracts.models import ModelCard, ModelSpec
from shared.errors import StoreFull, Unavailable
from tests.support.fake_node import model_info
from weights.pool.memory import PoolMemory
from weights.sources.sources import Sources
from weights.transfer.links import Links

CARD = ModelCard(spec=ModelSpec(name="m", source="s3://b/m"), info=model_info("s3://b/m"), created=0)
OTHER = CARD.model_copy(update={"info": CARD.info.model_copy(update={"revision": "f" * 32})})


class Disk:
    """Runs and sources of a node: one download, which the test ends."""

    cache = None

    def __init__(self) -> None:
        self.is_here = False
        self.done: Future[bool] = Future()
        self.cancelled: list[str] = []
        self.begun = asyncio.Event()
        self.waits_for_load = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.settled = threading.Event()
        self.settled.set()
        self.copies = DiskCopies(cast(Sources, self), cast(Runs, self))

    @contextmanager
    def open_complete(self, revision: str) -> Iterator[Any]:
        yield self if self.is_here else None

    def wait_until_settled(self, weights_id: str) -> None:
        """Wait for the loads, which write to the disk until the test ends them."""
        self._loop.call_soon_threadsafe(self.waits_for_load.set)
        self.settled.wait()

    def complete_on_disk(self, card: ModelCard) -> Future[bool]:
        self.begun.set()
        return self.done

    def cancel_on_disk(self, weights_id: str) -> None:
        self.cancelled.append(weights_id)

    async def write(self) -> asyncio.Task[None]:
        """Start a call, and return it when it waits for the download."""
        self.begun.clear()
        task = asyncio.create_task(self.copies.write(CARD))
        await self.begun.wait()
        return task


async def test_the_last_call_that_is_cancelled_cancels_the_download() -> None:
    disk = Disk()
    first, second = await disk.write(), await disk.write()
    for task, cancelled in ((first, []), (second, [CARD.info.revision])):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert disk.cancelled == cancelled
    assert not disk.done.cancelled()


async def test_a_cancelled_call_leaves_the_download_to_the_others() -> None:
    disk = Disk()
    first, second = await disk.write(), await disk.write()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    disk.is_here = True
    disk.done.set_result(False)
    await second
    assert disk.cancelled == []


async def test_a_download_that_is_not_kept_is_an_error() -> None:
    disk = Disk()
    disk.cache = cast(Any, type("Cache", (), {"root": "/cache"}))
    waiting = await disk.write()
    disk.done.set_result(False)
    with pytest.raises(StoreFull, match="THAW_CACHE_BYTES"):
        await waiting


async def test_a_download_that_a_load_continues_ends_with_the_load() -> None:
    disk = Disk()
    waiting = await disk.write()
    disk.settled.clear()
    disk.done.set_result(True)
    async with asyncio.timeout(30):
        await disk.waits_for_load.wait()
    assert not waiting.done()
    disk.is_here = True
    disk.settled.set()
    await waiting


async def test_a_download_begins_again_if_the_load_that_continues_it_is_cancelled() -> None:
    disk = Disk()
    waiting = await disk.write()
    first, disk.done = disk.done, Future()
    disk.begun.clear()
    first.set_result(True)
    await disk.begun.wait()
    disk.is_here = True
    disk.done.set_result(False)
    await waiting


async def test_calls_that_wait_for_loads_leave_threads_to_the_status() -> None:
    disk = Disk()
    disk.settled.clear()
    calls = [asyncio.create_task(disk.copies.write(CARD)) for _ in range(40)]  # more than `asyncio.to_thread` has threads
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(30):
            await asyncio.to_thread(threading.get_ident)
    finally:
        disk.is_here = True
        disk.settled.set()
        await asyncio.gather(*calls)


def test_downloads_that_wait_in_the_queue_end_with_the_loader() -> None:
    """The first download holds the only thread; the second has not begun."""
    asked, may_end = threading.Event(), threading.Event()

    class Unreachable:
        def open(self, *_: object, **__: object) -> None:
            asked.set()
            may_end.wait()
            raise Unavailable("The source cannot be reached")

    fill = CacheFill(cast(Sources, Unreachable()), Links("fair"), 1)
    first = fill.begin(CARD)
    asked.wait()
    second = fill.begin(OTHER)
    closing = threading.Thread(target=fill.close)
    closing.start()
    may_end.set()
    closing.join()
    assert not first.result()
    assert not second.result()


def test_a_load_continues_the_download_of_its_model_and_is_waited_for() -> None:
    """The load's source opens only after the call waits for it."""
    asked, may_open, opened = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def open(self, *_: object, **__: object) -> None:
            asked.set()
            may_open.wait()
            opened.set()
            raise Unavailable("The source cannot be reached")

    runs = Runs(cast(PoolMemory, None), cast(Sources, Slow()), lambda event: None, Threads(1, 1))
    download = runs.complete_on_disk(CARD)
    asked.wait()
    runs.start(StartRun(CARD.info.revision, 1, CARD))
    threading.Timer(0.05, may_open.set).start()
    runs.wait_until_settled(CARD.info.revision)
    assert opened.is_set()
    assert download.result()
    runs.close()
