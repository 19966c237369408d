"""Retries of an operation on the store of idempotency keys."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from services.gateway.idempotency import store_retry
from services.gateway.idempotency.store_retry import retry_store


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_retry, "_STORE_RETRY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(store_retry, "_STORE_RETRY_S", 0.02)
    monkeypatch.setattr(store_retry, "_QUICK_FAILURE_S", 0.15)


class Operation:
    """An operation that fails a number of times, each after some seconds."""

    def __init__(self, failures: int, lasts_s: float) -> None:
        self.failures, self.lasts_s = failures, lasts_s

    async def __call__(self) -> str:
        await asyncio.sleep(self.lasts_s)
        if self.failures:
            self.failures -= 1
            raise TimeoutError
        return "done"


async def test_retries_outlast_an_outage_that_starts_late() -> None:
    """Retries outlast an outage that begins late.

    Chaos seed 1: a response was followed for a minute; NATS stopped then, and the first failure was
    final.
    """
    assert await retry_store(Operation(3, 0.25)) == "done"


async def test_retries_stop_if_the_store_stays_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_retry, "_STORE_RETRY_TIMEOUT_S", 1.0)
    # The loop's clock: a pause of the process is no time in which attempts could be made.
    monkeypatch.setattr(store_retry, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
    operation = Operation(1_000, 0.0)
    with pytest.raises(TimeoutError):
        await retry_store(operation)
    assert operation.failures < 1_000 - 2, "it was repeated"
