"""Memory of a KV cache on the stand-in GPU: pages, ranges, and the order of calls."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.domain.step_planning import BLOCK_TOKENS
from services.engine.generation.kv_cache import SequenceKV
from services.engine.generation.runner import PackedRunner, SequentialRunner
from services.engine.model import ready_model
from services.engine.model.gpu_kv import STRIDE_BYTES, GpuKvMemory
from shared.contracts.engine import EngineStart
from shared.errors import DeviceFailed, EngineFailed, InsufficientMemory
from tests.support.examples import examples
from tests.support.stand_in_gpu import StandInGpu

HEADS, WIDTH, LAYERS = 3, 16, 2
CONTEXT = 8 * BLOCK_TOKENS
TOKEN_BYTES = LAYERS * 2 * HEADS * WIDTH * 4
PAGES = 12


class Cache:
    """Memory for sequences of `LAYERS` layers, on a GPU of `PAGES` pages."""

    def __init__(self, token_bytes: int = TOKEN_BYTES, pages: int = PAGES) -> None:
        self.gpu = StandInGpu(pages)
        self.memory = GpuKvMemory(self.gpu, token_bytes, CONTEXT)

    def sequence(self) -> SequenceKV:
        return SequenceKV(CONTEXT, self.memory)

    def grow(self, sequence: SequenceKV, tokens: int, start: int = 0) -> torch.Tensor:
        """Store the same values of `tokens` tokens in all layers, and return those of the first."""
        new = torch.randn(1, HEADS, tokens, WIDTH)
        for layer in range(LAYERS):
            sequence.append(layer, start, new, new + layer)
        self.gpu.issue()
        return new

    def close(self) -> None:
        gc.collect()
        self.memory.close()
        vm = self.gpu.memory
        assert (vm.handles, vm.mappings, vm.reservations, self.memory.allocated_pages) == ({}, {}, {}, 0)


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache()
    yield cache
    cache.close()


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
@settings(max_examples=examples(25), deadline=None)
def test_cache_returns_what_was_stored(counts: list[int], dtype: torch.dtype, rewinds: bool) -> None:
    cache = Cache()
    assert cache.memory.add(8) == 8
    stored = cache.sequence()
    kept = [(torch.zeros(1, HEADS, 0, WIDTH, dtype=dtype),) * 2 for _ in range(LAYERS)]
    start = 0
    for count in counts:
        start = start // 2 if rewinds and count % 3 == 0 else start
        for layer in range(LAYERS):
            new = tuple(torch.randn(1, HEADS, count, WIDTH).to(dtype) for _ in range(2))
            kept[layer] = tuple(torch.cat([k[:, :, :start], n], 2) for k, n in zip(kept[layer], new, strict=True))  # type: ignore[assignment]
            found = stored.append(layer, start, *new)
            assert all(torch.equal(a, b) for a, b in zip(found, kept[layer], strict=True))
        start += count
    assert torch.equal(stored.copy_range(1, 0, start)[:1], kept[1][0])
    del stored, found
    cache.close()


def test_memory_grows_by_blocks_and_a_context_is_not_copied(cache: Cache) -> None:
    cache.memory.add(4)
    sequence, addresses = cache.sequence(), set()
    for start in range(0, 3 * BLOCK_TOKENS, BLOCK_TOKENS // 2):
        new = torch.randn(1, HEADS, BLOCK_TOKENS // 2, WIDTH)
        addresses.add(sequence.append(0, start, new, new)[0].data_ptr())
        assert cache.gpu.mapped_pages == start // BLOCK_TOKENS + 1
    assert (len(addresses), cache.gpu.allocated_pages) == (1, 4)
    assert sequence.nbytes == 3 * cache.memory.block_bytes


def test_a_block_has_whole_pages(cache: Cache) -> None:
    assert cache.memory.token_bytes == STRIDE_BYTES
    assert cache.memory.block_pages == 1
    large = Cache(token_bytes=8 * STRIDE_BYTES + 1, pages=24)
    assert large.memory.block_pages == 9
    large.memory.add(20)
    large.grow(large.sequence(), BLOCK_TOKENS + 1)
    assert large.gpu.mapped_pages == 18
    large.close()


def test_the_next_sequence_gets_mapped_memory_without_a_wait(cache: Cache) -> None:
    cache.memory.add(3)
    first = cache.sequence()
    cache.grow(first, 3 * BLOCK_TOKENS)
    mapped = dict(cache.gpu.memory.mappings)
    del first
    second = cache.sequence()
    cache.grow(second, 2 * BLOCK_TOKENS)
    assert (cache.gpu.memory.mappings, cache.gpu.waits) == (mapped, 0)


def test_memory_of_an_ended_sequence_moves_after_its_work(cache: Cache) -> None:
    """The stand-in refuses to unmap memory that issued work uses."""
    cache.memory.add(4)
    first, second = cache.sequence(), cache.sequence()
    cache.grow(first, 2 * BLOCK_TOKENS)
    cache.grow(second, BLOCK_TOKENS)
    [address, *_] = cache.gpu.memory.mappings
    with pytest.raises(DeviceFailed, match="may still use"):
        cache.gpu.memory.unmap(address, cache.gpu.memory.mappings[address].nbytes)
    del first
    cache.grow(second, 3 * BLOCK_TOKENS, BLOCK_TOKENS)
    assert (cache.gpu.waits, cache.gpu.mapped_pages, cache.gpu.allocated_pages) == (1, 4, 4)


def test_returned_pages_have_no_memory(cache: Cache) -> None:
    cache.memory.add(6)
    first, second = cache.sequence(), cache.sequence()
    cache.grow(first, 2 * BLOCK_TOKENS)
    cache.grow(second, 2 * BLOCK_TOKENS)
    cache.memory.remove(2)
    assert (cache.gpu.allocated_pages, cache.gpu.waits) == (4, 0), "pages that are mapped nowhere go first"
    del first
    cache.memory.remove(1)
    assert (cache.gpu.allocated_pages, cache.gpu.mapped_pages, cache.gpu.waits) == (3, 3, 1)
    cache.grow(second, BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    assert (cache.gpu.mapped_pages, cache.gpu.allocated_pages) == (3, 3)


def test_a_full_gpu_gives_memory_to_fewer_pages(cache: Cache) -> None:
    taken = cache.gpu.memory.create(0, (PAGES - 4) * 2 * 1024 * 1024)
    assert cache.memory.add(6) == 4
    assert cache.memory.add(1) == 0
    cache.gpu.memory.release(taken)
    assert cache.memory.add(3) == 3
    assert cache.memory.allocated_pages == 7


def test_pages_of_adapters_have_no_memory_here(cache: Cache) -> None:
    cache.memory.keep_for_others(3)
    assert cache.memory.add(5) == 5
    assert cache.gpu.allocated_pages == 2
    cache.memory.keep_for_others(1)
    assert cache.gpu.allocated_pages == 4
    sequence = cache.sequence()
    cache.grow(sequence, 3 * BLOCK_TOKENS)
    del sequence
    cache.memory.keep_for_others(3)
    assert (cache.gpu.allocated_pages, cache.gpu.waits) == (2, 1)
    cache.memory.remove(5)
    assert cache.gpu.allocated_pages == 0


def test_a_sequence_beyond_the_pages_gets_memory_which_the_next_pages_account_for(cache: Cache) -> None:
    """The first steps of an engine, before the loader has lent pages."""
    sequence = cache.sequence()
    cache.grow(sequence, 2)
    assert cache.gpu.allocated_pages == 1
    assert cache.memory.add(3) == 3
    assert cache.gpu.allocated_pages == 3


def test_a_cut_sequence_keeps_its_memory_until_it_ends(cache: Cache) -> None:
    cache.memory.add(4)
    sequence = cache.sequence()
    cache.grow(sequence, 4 * BLOCK_TOKENS)
    cache.grow(sequence, 1, BLOCK_TOKENS)
    cache.memory.remove(2)
    assert cache.gpu.allocated_pages == 4, "the sequence has two pages more than it needs"
    del sequence
    cache.memory.keep_for_others(0)  # as after each step
    assert (cache.gpu.allocated_pages, cache.gpu.mapped_pages) == (2, 2)


def test_without_memory_a_step_fails_and_the_sequence_can_continue_later() -> None:
    cache = Cache(pages=2)
    cache.memory.add(2)
    sequence, other = cache.sequence(), cache.sequence()
    new = cache.grow(sequence, BLOCK_TOKENS)
    cache.grow(other, BLOCK_TOKENS)
    with pytest.raises(InsufficientMemory):
        cache.grow(sequence, BLOCK_TOKENS, BLOCK_TOKENS)
    del other
    cache.grow(sequence, BLOCK_TOKENS, BLOCK_TOKENS)
    assert torch.equal(sequence.copy_range(0, 0, BLOCK_TOKENS)[:1], new)
    assert cache.gpu.allocated_pages == 2
    del sequence
    cache.close()


def test_layers_beyond_the_bytes_of_a_token_are_an_error(cache: Cache) -> None:
    cache.memory.add(1)
    sequence, wide = cache.sequence(), torch.zeros(1, 40, 1, 64)
    with pytest.raises(EngineFailed, match="more than the 16384 bytes"):
        sequence.append(0, 0, wide, wide)


def test_a_model_with_a_cache_of_its_own_does_not_start_where_pages_are_lent(demo_directory: Path) -> None:
    """Its keys and values would be in memory of torch, which no page accounts for."""
    start = cast(EngineStart, SimpleNamespace(card=SimpleNamespace(name="mamba", context_length=128), device="cuda:0"))
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_directory)
    device = torch.device("cpu")
    with pytest.raises(EngineFailed, match=r"mamba cannot borrow pages of cuda:0.*Unset THAW_CUDA_LEND_KV"):
        ready_model._borrow_memory(SequentialRunner(model, device), "0000:00:00.0", TOKEN_BYTES, start)
    runner = PackedRunner(model, device, 128)
    memory = ready_model._borrow_memory(runner, "0000:00:00.0", TOKEN_BYTES, start)
    assert runner.kv_memory is memory
