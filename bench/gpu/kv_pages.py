"""A KV cache in pages that a GPU lends (ADR 0107): attention, growth, and freed memory.

    python -m bench.gpu.kv_pages [--device cuda:0] [--layers N] [--heads N] [--kv-heads N]
        [--width N] [--tokens N] [--rounds N] [--json PATH]

- attention_ratio: attention of one new token in all layers, over the pages beside tensors of torch,
  in turns; medians. attention_ms, contiguous_ms: the times
- allocate_ms, map_ms, move_ms, release_ms: for each page of 2 MiB. `move`: unmapped from an ended
  sequence and mapped for another
- freed_part: of the memory of returned pages, what the driver reports as free

Exit status 2: there is no such device, or it has no allocations that can be exported.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.gpu.runner import NOTHING_MEASURED
from bench.report import median, write
from services.engine.domain.step_planning import BLOCK_TOKENS
from services.engine.generation.kv_cache import SequenceKV
from services.engine.model.gpu_kv import Gpu, GpuKvMemory, TorchGpu
from shared.errors import DeviceMissing
from weights.devices.cuda_runtime import load_cuda
from weights.devices.cuda_virtual_memory import load_virtual_memory
from weights.kv_lease import PAGE_BYTES


@dataclass(frozen=True)
class Shape:
    """A model's attention, and the tokens of a sequence."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    tokens: int = 4096
    dtype: torch.dtype = torch.bfloat16

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.width * self.dtype.itemsize


def measure(gpu: Gpu, shape: Shape, rounds: int, free_bytes: Callable[[], int]) -> dict[str, float]:
    """Return the figures.

    Args:
        gpu: The GPU.
        shape: What to compute.
        rounds: Passes over all layers.
        free_bytes: Returns the device's free bytes as the driver reports them.
    """
    with gpu.use() as (_, device):
        memory = GpuKvMemory(gpu, shape.token_bytes, shape.tokens + BLOCK_TOKENS)
        pages = -(-shape.tokens // BLOCK_TOKENS) * memory.block_pages
        took = {"allocate": _time_s(gpu, lambda: memory.add(pages))}
        first, second = memory.take(), memory.take()
        took["map"] = _time_s(gpu, partial(first.cover, shape.tokens))
        memory.take_back(first)
        took["move"] = _time_s(gpu, partial(second.cover, shape.tokens))
        memory.take_back(second)
        figures = compare_attention(gpu, memory, shape, rounds, device)
        gc.collect()
        before = free_bytes()
        took["release"] = _time_s(gpu, lambda: memory.remove(pages))
        figures["freed_part"] = (free_bytes() - before) / (pages * PAGE_BYTES)
        memory.close()
    return figures | {f"{what}_ms": s * 1e3 / pages for what, s in took.items()} | {"pages": float(pages)}


def compare_attention(gpu: Gpu, memory: GpuKvMemory, shape: Shape, rounds: int, device: torch.device) -> dict[str, float]:
    """Compute attention of one new token in all layers, over pages and over tensors of torch.

    Raises:
        AssertionError: The results differ by more than rounding.
    """
    size = (1, shape.kv_heads, shape.tokens, shape.width)
    paged, plain = SequenceKV(shape.tokens, memory), []
    for layer in range(shape.layers):
        keys, values = (torch.randn(size, dtype=shape.dtype, device=device) for _ in range(2))
        plain.append((keys, values))
        paged.append(layer, 0, keys, values)
    mapped = [(held[:1, :, : shape.tokens], held[1:, :, : shape.tokens]) for held in paged.layers.values()]
    query = torch.randn((1, shape.heads, 1, shape.width), dtype=shape.dtype, device=device)

    def attend(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        attention = torch.nn.functional.scaled_dot_product_attention
        return [attention(query, keys, values, enable_gqa=shape.heads != shape.kv_heads) for keys, values in layers]

    for a, b in zip(attend(mapped), attend(plain), strict=True):
        torch.testing.assert_close(a, b)
    times: dict[str, list[float]] = {"attention": [], "contiguous": []}
    for _ in range(rounds):
        times["attention"].append(_time_s(gpu, lambda: attend(mapped)))
        times["contiguous"].append(_time_s(gpu, lambda: attend(plain)))
    found = {f"{what}_ms": median(values) * 1e3 for what, values in times.items()}
    return found | {"attention_ratio": found["attention_ms"] / found["contiguous_ms"]}


def _time_s(gpu: Gpu, work: Callable[[], object]) -> float:
    """Return the seconds of some work, with what it has issued."""
    gpu.synchronize()
    began = time.perf_counter()
    work()
    gpu.synchronize()
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.kv_pages", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda:0")
    for name in ("layers", "heads", "kv_heads", "width", "tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Shape, name))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    index = int(options.device.removeprefix("cuda:"))
    try:
        cuda = load_cuda()
        cuda.use(index)
    except DeviceMissing as e:
        print(f"nothing measured: {e.message}")
        return NOTHING_MEASURED
    if not load_virtual_memory().is_supported(index) or not torch.cuda.is_available():
        print(f"nothing measured: {options.device} has no virtual memory management, or torch no CUDA")
        return NOTHING_MEASURED
    shape = Shape(options.layers, options.heads, options.kv_heads, options.width, options.tokens)
    figures = measure(TorchGpu(cuda.facts(index).bus_id), shape, options.rounds, cuda.free_bytes)
    for name, value in figures.items():
        print(f"{name} {value:.4g}")
    write(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
