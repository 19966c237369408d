"""Full garbage collections wait for an idle gateway, or for memory growth."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from services.gateway.adapters import garbage_collector as garbage
from services.gateway.adapters.garbage_collector import collect_when_idle, resident_bytes, start_collecting_rarely

MIB = 1 << 20


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    found: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: found.append(None))
    return found


@pytest.mark.parametrize(
    ("activity", "memory", "expected"),
    [
        ([0, 5, 5, 5], [100] * 9, 1),  # requests were served: once, and not again
        ([0, 0, 0, 0], [100] * 9, 0),  # no request was served
        ([0, None, None, None], [100] * 9, 0),  # busy
        ([0, None, None, None], [100, 400, 400, 400, 400], 1),  # busy, and memory grew
    ],
)
async def test_collection_runs_when_idle_or_after_memory_growth(
    collections: list[None], activity: list[int | None], memory: list[int], expected: int
) -> None:
    left, sizes = list(activity), iter(memory)

    def next_activity() -> int | None:
        if not left:
            raise asyncio.CancelledError
        return left.pop(0)

    with pytest.raises(asyncio.CancelledError):
        await collect_when_idle(next_activity, period_s=0, memory_bytes=lambda: next(sizes) * MIB)
    assert len(collections) == expected


@pytest.fixture
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("usual")
def test_oldest_generation_is_not_collected_automatically() -> None:
    start_collecting_rarely()
    assert gc.get_freeze_count() > 0
    full = gc.get_stats()[2]["collections"]
    held = [[n] for n in range(300_000)]  # enough for dozens of collections of the middle generation
    assert gc.get_stats()[2]["collections"] == full
    assert len(held) == 300_000
    assert gc.get_threshold() == garbage._THRESHOLDS


def test_resident_memory_is_measured() -> None:
    assert 10 * MIB < resident_bytes() < 100 << 30
