"""KV caches that borrow pages of a real GPU (ADR 0107): `python -m pytest tests/gpu -s`.

The tests of lending are those of tests/unit/loader/store, where they run on the stand-in driver.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from bench.gpu.kv_pages import Shape, measure
from services.engine.generation.kv_cache import SequenceKV
from services.engine.generation.runner import PackedRunner, Row
from services.engine.model.gpu_kv import GpuKvMemory, TorchGpu
from services.loader.handlers import Loader
from services.loader.kv_lending import KvLending
from services.loader.local_socket import LocalReaders, listening
from tests.gpu.real_gpus import RealGpus, load_gpus
from tests.integration.engine.loaded_model import LoadedModel
from tests.unit.loader.store import borrowing_engine, test_kv_lending_live, test_lending
from tests.unit.loader.store.borrowers import BORROWER
from tests.unit.loader.store.gpu import Gpus
from tests.unit.loader.store.separate_devices import COUNT
from weights.devices.cuda_runtime import CudaRuntime
from weights.kv_lease import PAGE_BYTES
from weights.pool import shm
from weights.store.separate import SeparateDevice

pytestmark = pytest.mark.gpu

test_reclaim = test_lending.test_reusable_units_are_reclaimed_for_a_cache
test_no_memory = test_lending.test_a_lent_page_has_no_memory_in_the_pool
test_waiting_load = test_lending.test_a_load_waits_until_a_borrower_has_shrunk
test_booked_pages = test_lending.test_a_load_does_not_wait_for_booked_pages
test_floors = test_lending.test_a_borrower_shrinks_for_the_floor_of_another
test_turns = test_lending.test_borrowers_take_turns_in_the_order_in_which_they_asked
test_killed_engine = test_kv_lending_live.test_killed_engine_returns_every_page
test_demand = test_kv_lending_live.test_demand_is_met_when_another_engine_returns_pages
test_shrinking = test_kv_lending_live.test_engine_shrinks_for_a_load


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    gpus = RealGpus(COUNT, lends_kv=True)
    BORROWER[0] = gpus.exited.pid
    yield gpus
    gpus.close()


@pytest.fixture
def device(gpus: Gpus) -> Iterator[SeparateDevice]:
    device = gpus.get("cuda:0")
    yield device
    assert device.audit() == []


@pytest.fixture
async def path(device: SeparateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    need_torch()
    monkeypatch.setattr(borrowing_engine, "KIND", "real")
    loader = cast(Loader, borrowing_engine.NoLoads())
    readers = LocalReaders(loader, shm.SHM, "socket", KvLending(lambda: {"cuda:0": device}))
    async with listening(tmp_path / "loader.sock", readers):
        yield tmp_path / "loader.sock"


def need_torch() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch here has no CUDA")


@pytest.fixture
def cuda() -> CudaRuntime:
    cuda = load_gpus()
    need_torch()
    return cuda


def test_memory_is_there_while_pages_are_lent_and_free_afterwards(cuda: CudaRuntime) -> None:
    torch.zeros(1, device="cuda:0")  # the context
    cuda.use(0)
    before = cuda.free_bytes()
    memory = GpuKvMemory(TorchGpu(cuda.facts(0).bus_id), 128 * 1024, 1024)
    assert memory.add(64) == 64
    assert before - cuda.free_bytes() >= 64 * PAGE_BYTES
    memory.remove(64)
    assert before - cuda.free_bytes() < 64 * PAGE_BYTES
    memory.close()


def test_memory_moves_between_sequences_behind_the_work_that_uses_it(cuda: CudaRuntime) -> None:
    """The first sequence ends while the GPU still works on it."""
    memory = GpuKvMemory(TorchGpu(cuda.facts(0).bus_id), 128 * 1024, 1024)
    memory.add(16)
    first, second = SequenceKV(1024, memory), SequenceKV(1024, memory)
    new = torch.randn(1, 8, 128, 128, dtype=torch.bfloat16, device="cuda:0")
    second.append(0, 0, new, new)
    kept = first.append(0, 0, new, new)[0]
    slow = torch.ones(8192, 8192, device="cuda:0")
    for _ in range(20):
        slow = slow @ slow / 8192
    read = kept * slow[0, 0].to(torch.bfloat16)  # a product of ones
    del first, kept
    more = torch.randn(1, 8, 128, 128, dtype=torch.bfloat16, device="cuda:0")
    keys, _ = second.append(0, 128, more, more)
    assert torch.equal(keys[:, :, :128], new)
    assert torch.equal(keys[:, :, 128:], more)
    assert torch.equal(read, new)
    assert memory.allocated_pages == 16
    del second, keys
    gc.collect()
    memory.remove(16)
    memory.close()


def test_a_model_computes_the_same_tokens_in_lent_pages(cuda: CudaRuntime, demo_directory: Path) -> None:
    loaded = LoadedModel(demo_directory, "float32")
    try:
        device = torch.device("cuda:0")
        runner = PackedRunner(loaded.computable.model.to(device), device, 512)
        expected = greedy(runner, list(range(10, 210)), 64)
        token_bytes = loaded.computable.block_bytes // 128
        memory = runner.kv_memory = GpuKvMemory(TorchGpu(cuda.facts(0).bus_id), token_bytes, 512)
        memory.add(4 * memory.block_pages)
        assert greedy(runner, list(range(10, 210)), 64) == expected
        gc.collect()
        memory.remove(4 * memory.block_pages)
        memory.close()
    finally:
        loaded.close()


def greedy(runner: PackedRunner, prompt: list[int], count: int) -> list[int]:
    state, tokens, computed = runner.new_state(), list(prompt), 0
    for _ in range(count):
        logits = runner.forward([Row(state, computed, tokens[computed:])])
        computed = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


def test_figures_are_printed(cuda: CudaRuntime) -> None:
    cuda.use(0)
    figures = measure(TorchGpu(cuda.facts(0).bus_id), Shape(layers=8), 20, cuda.free_bytes)
    sys.stdout.write("\n" + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()) + "\n")
    assert figures["freed_part"] > 0.99
