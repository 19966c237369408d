"""The KV cache beside plain concatenation: equal values, no copies, memory for what is written."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.domain.step_planning import BLOCK_TOKENS
from services.engine.generation import kv_cache
from services.engine.generation.kv_cache import SequenceKV
from tests.support.examples import examples

HEADS, WIDTH = 3, 16
CONTEXT = 8 * BLOCK_TOKENS


def drawn(tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, HEADS, tokens, WIDTH, dtype=dtype)


def resident_bytes() -> int:
    """Return the anonymous memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0, 100, CONTEXT]),
    st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_cache_returns_what_was_stored(counts: list[int], dtype: torch.dtype, context: int, rewinds: bool) -> None:
    cache = SequenceKV(context)
    kept = [(drawn(0, dtype), drawn(0, dtype)) for _ in range(2)]
    start = 0
    for count in counts:
        start = start // 2 if rewinds and count % 5 == 0 else start
        for layer in range(2):
            keys, values = drawn(count, dtype), drawn(count, dtype)
            kept[layer] = tuple(torch.cat([k[:, :, :start], n], 2) for k, n in zip(kept[layer], (keys, values), strict=True))  # type: ignore[assignment]
            found = cache.append(layer, start, keys, values)
            assert all(torch.equal(a, b) for a, b in zip(found, kept[layer], strict=True))
        start += count


def test_growing_context_is_not_copied() -> None:
    cache = SequenceKV(CONTEXT)
    first, _ = cache.append(0, 0, drawn(10), drawn(10))
    for start in range(10, CONTEXT, 10):
        count = min(10, CONTEXT - start)
        keys, _ = cache.append(0, start, drawn(count), drawn(count))
        assert keys.data_ptr() == first.data_ptr()


def test_reserved_addresses_use_memory_only_where_written() -> None:
    long = 512 * BLOCK_TOKENS
    gc.collect()
    before = resident_bytes()
    cache = SequenceKV(long)
    tokens = 16 * BLOCK_TOKENS
    cache.append(0, 0, torch.ones(1, HEADS, tokens, WIDTH), torch.ones(1, HEADS, tokens, WIDTH))
    used = 2 * HEADS * tokens * WIDTH * 4
    assert cache.nbytes == used
    assert used <= resident_bytes() - before < 4 * used  # the arguments are freed; the whole range is 32 times as large


def test_memory_is_freed_with_the_sequence() -> None:
    gc.collect()
    before = resident_bytes()
    keys = torch.ones(1, HEADS, 64 * BLOCK_TOKENS, WIDTH)
    for _ in range(50):
        cache = SequenceKV(64 * BLOCK_TOKENS)
        cache.append(0, 0, keys, keys)
        one = cache.nbytes
        del cache
    assert resident_bytes() - before < 4 * one


def test_without_reserved_addresses_contexts_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(kv_cache, "reserve", refuse)
    cache = SequenceKV(CONTEXT)
    keys, values = drawn(BLOCK_TOKENS), drawn(BLOCK_TOKENS)
    cache.append(0, 0, keys, values)
    found = cache.append(0, BLOCK_TOKENS, keys, values)
    assert torch.equal(found[0], torch.cat([keys, keys], 2))
    assert torch.equal(found[1], torch.cat([values, values], 2))
