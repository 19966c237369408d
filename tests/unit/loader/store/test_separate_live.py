"""The loader's loop loads weights to a device that keeps units.

On a cpu device with memory of its own, and on a GPU by the stand-in driver.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.contracts.base import ErrorBody
from shared.contracts.loader import AttachWeights, WeightsAttached
from tests.unit.loader.store.separate_bench import BENCHES, TENSORS, SeparateBench, model
from weights.store.units import PAGE_BYTES


@pytest.fixture(params=BENCHES, ids=["cpu", "gpu"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SeparateBench]:
    bench: SeparateBench = request.param(tmp_path / "home")
    await bench.start()
    yield bench
    await bench.stop()


@pytest.mark.parametrize("hashed", [True, False], ids=["converted", "other"])
async def test_a_second_load_copies_nothing_and_a_fine_tune_a_fifth(bench: SeparateBench, tmp_path: Path, hashed: bool) -> None:
    base = await model(bench, tmp_path / "base", hashed=hashed)
    first = bench.read("a", await bench.on_device("a", base))
    one = bench.memory()
    assert (one.copied_bytes, one.mapped_bytes) == (TENSORS * PAGE_BYTES, TENSORS * PAGE_BYTES)
    await bench.release("a")
    assert bench.memory().reusable_bytes == one.mapped_bytes
    await bench.until_segments(0)  # host memory has nothing of it any more
    assert bench.read("b", await bench.on_device("b", base)) == first
    assert bench.memory().copied_bytes == one.copied_bytes
    tuned = await model(bench, tmp_path / "tuned", changed=2, hashed=hashed)
    second = bench.read("c", await bench.on_device("c", tuned))
    both = bench.memory()
    assert second[: 8 * PAGE_BYTES] == first[: 8 * PAGE_BYTES]
    assert second[8 * PAGE_BYTES :] != first[8 * PAGE_BYTES :]
    assert both.copied_bytes - one.copied_bytes == one.copied_bytes // 5
    assert both.mapped_bytes == one.mapped_bytes * 6 // 5
    assert [m.shared_bytes for m in both.models] == [8 * PAGE_BYTES] * 2
    await bench.release("b")
    await bench.release("c")
    assert (bench.memory().mapped_bytes, bench.memory().reusable_bytes) == (0, both.mapped_bytes)


async def test_a_device_without_room_is_an_error_of_the_attach(bench: SeparateBench, tmp_path: Path) -> None:
    await bench.on_device("a", await model(bench, tmp_path / "base", hashed=False))
    other = await model(bench, tmp_path / "other", changed=TENSORS, hashed=False, more=1)
    refused = await bench.on_device("b", other)
    assert refused.handle is None
    if bench.DEVICE.startswith("cpu"):
        assert isinstance(refused.device_error, ErrorBody)
        assert refused.device_error.code == "insufficient_memory"
    else:
        assert refused.device_error is None, "the engine copies the weights from host memory"
        assert refused.loaded_bytes == refused.total_bytes
    await bench.release("a")
    assert (await bench.on_device("b", other)).handle is None, "it is tried again by another instance"
    await bench.release("b")
    assert bench.read("c", await bench.on_device("c", other))


async def test_devices_without_memory_of_their_own_get_no_copy(bench: SeparateBench, tmp_path: Path) -> None:
    card = await model(bench, tmp_path / "m", hashed=False)
    asked = AttachWeights(instance_id="a", card=card, until="complete", device="cpu:0")
    found = await bench.loader.handle(asked)
    assert isinstance(found, WeightsAttached)
    assert (found.handle, found.device_error) == (None, None)
    assert bench.memory().copied_bytes == 0
