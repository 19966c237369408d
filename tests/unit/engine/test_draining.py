"""The end of a drain, while another engine reads keys and values."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from services.engine.kv_transfer.exchange import KvExchange
from services.engine.kv_transfer.source import KvSource
from services.engine.server.serving import Serving
from shared.messaging import Mesh


class Source:
    """A source of transfers.

    Attributes:
        callbacks: To be called when its readers have ended.
    """

    def __init__(self, *, is_read: bool) -> None:
        self._is_read = is_read
        self.callbacks: list[Callable[[], None]] = []

    def call_when_unread(self, callback: Callable[[], None]) -> bool:
        if self._is_read:
            self.callbacks.append(callback)
        return self._is_read


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    found = Serving(cast(Mesh, None))
    yield found
    found.close()


def exchange_of(source: Source) -> KvExchange:
    exchange = KvExchange.__new__(KvExchange)
    exchange.source = cast(KvSource, cast(Any, source))
    return exchange


async def test_drain_without_requests_waits_for_engines_that_read_the_last_one(serving: Serving) -> None:
    source = Source(is_read=True)
    serving.exchange = exchange_of(source)
    serving.drain(only_if_idle=False)
    assert not serving.drained.is_set()
    for callback in source.callbacks:
        callback()
    assert serving.drained.is_set()


async def test_drain_without_requests_and_readers_ends_at_once(serving: Serving) -> None:
    serving.exchange = exchange_of(Source(is_read=False))
    serving.drain(only_if_idle=False)
    assert serving.drained.is_set()
