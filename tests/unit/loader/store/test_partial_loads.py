"""A load to a device that keeps units reads what it lacks, and host memory keeps nothing of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.contracts.loader import AttachWeights, WeightsAttached
from shared.contracts.models import ModelCard
from shared.contracts.segment import PAGE
from tests.unit.loader.store.separate_bench import BENCHES, TENSORS, SeparateBench, model
from weights.store.units import PAGE_BYTES


@pytest.fixture(params=BENCHES, ids=["cpu", "gpu"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SeparateBench]:
    bench: SeparateBench = request.param(tmp_path / "home")
    await bench.start()
    yield bench
    await bench.stop()


def counted(bench: SeparateBench) -> tuple[int, int, int]:
    """Return units read, copied and held by the device."""
    memory = bench.memory()
    return (
        round(bench.status().read_bytes / PAGE_BYTES),
        memory.copied_bytes // PAGE_BYTES,
        (memory.mapped_bytes + memory.reusable_bytes) // PAGE_BYTES,
    )


async def on_host(bench: SeparateBench, instance: str, card: ModelCard) -> WeightsAttached:
    found = await bench.loader.handle(AttachWeights(instance_id=instance, card=card, until="complete"))
    assert isinstance(found, WeightsAttached)
    return found


@pytest.mark.parametrize("hashed", [True, False], ids=["converted", "known from an earlier load"])
async def test_a_load_of_units_that_are_there_reads_no_weights(bench: SeparateBench, tmp_path: Path, hashed: bool) -> None:
    card = await model(bench, tmp_path / "m", hashed=hashed)
    first = bench.read("a", await bench.on_device("a", card))
    await bench.release("a")
    await bench.until_segments(0)
    before = bench.status().read_bytes
    assert bench.read("b", await bench.on_device("b", card)) == first
    assert bench.status().read_bytes == before
    assert counted(bench) == (TENSORS, TENSORS, TENSORS)


async def test_the_second_of_two_fine_tunes_starts_with_a_fifth_of_the_bytes(bench: SeparateBench, tmp_path: Path) -> None:
    base, tuned = await model(bench, tmp_path / "base"), await model(bench, tmp_path / "tuned", changed=2)
    first = bench.read("a", await bench.on_device("a", base))
    assert counted(bench) == (TENSORS, TENSORS, TENSORS)
    in_host_memory = bench.pool.count_allocated()
    second = bench.read("b", await bench.on_device("b", tuned))
    assert second[: 8 * PAGE_BYTES] == first[: 8 * PAGE_BYTES]
    assert second[8 * PAGE_BYTES :] != first[8 * PAGE_BYTES :]
    assert counted(bench) == (TENSORS + 2, TENSORS + 2, TENSORS + 2), "1.2 times one model"
    [head] = [s for s in bench.status().segments if s.weights_id == tuned.info.revision]
    assert bench.pool.count_allocated() - in_host_memory == head.loaded_bytes
    assert head.loaded_bytes <= 4 * PAGE, "of the second model, host memory has the head alone"
    await bench.release("a")
    await bench.release("b")
    await bench.until_segments(0)
    assert counted(bench) == (TENSORS + 2, TENSORS + 2, TENSORS + 2)


async def test_readers_of_host_memory_load_the_weights_as_a_whole(bench: SeparateBench, tmp_path: Path) -> None:
    card = await model(bench, tmp_path / "m")
    await bench.on_device("a", card)
    await bench.release("a")
    await bench.until_segments(0)
    on_device = await bench.on_device("b", card)
    whole = await on_host(bench, "c", card)
    assert whole.extents != on_device.extents
    assert (whole.loaded_bytes, on_device.loaded_bytes < whole.total_bytes) == (whole.total_bytes, True)
    assert counted(bench) == (2 * TENSORS, TENSORS, TENSORS)
    await bench.release("b")
    await bench.until_segments(1)
    assert (await on_host(bench, "d", card)).extents == whole.extents


async def test_weights_in_host_memory_are_copied_from_there(bench: SeparateBench, tmp_path: Path) -> None:
    base, tuned = await model(bench, tmp_path / "base"), await model(bench, tmp_path / "tuned", changed=2)
    await bench.on_device("a", base)
    await on_host(bench, "b", tuned)
    before = bench.status().read_bytes
    assert bench.read("c", await bench.on_device("c", tuned))
    assert bench.status().read_bytes == before
    assert bench.memory().copied_bytes == (TENSORS + 2) * PAGE_BYTES


async def test_bytes_that_differ_from_the_index_fail_a_partial_load(bench: SeparateBench, tmp_path: Path) -> None:
    base, tuned = await model(bench, tmp_path / "base"), await model(bench, tmp_path / "tuned", changed=2)
    await bench.on_device("a", base)
    file = max((f for f in (tmp_path / "tuned" / "converted").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    stat = file.stat()
    with file.open("r+b") as opened:
        opened.seek(stat.st_size - PAGE_BYTES // 2)
        opened.write(b"damaged!")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    found = await bench.on_device("b", tuned)
    assert found.handle is None
    assert found.device_error is not None
    assert "differ from the hashes" in found.device_error.message
    await bench.release("b")
    await bench.until_segments(1)
    memory = bench.memory()
    assert memory.mapped_bytes == TENSORS * PAGE_BYTES
    assert memory.reusable_bytes <= PAGE_BYTES, "its other unit, whose bytes are right, may stay"


async def test_a_partial_load_that_is_released_frees_everything(bench: SeparateBench, tmp_path: Path) -> None:
    base, tuned = await model(bench, tmp_path / "base"), await model(bench, tmp_path / "tuned", changed=2)
    await bench.on_device("a", base)
    asked = asyncio.create_task(bench.on_device("b", tuned))
    await asyncio.sleep(0)
    await bench.release("b")
    await asyncio.gather(asked, return_exceptions=True)
    await bench.until_segments(1)
    memory = bench.memory()
    assert memory.mapped_bytes == TENSORS * PAGE_BYTES
