"""Checkpoints as torch tensors in this process, for any program: no NATS, no mesh.

from services.loader.tensors import load_tensors
weights = load_tensors("/models/llama")
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self

from services.loader.adapters.reader import DEFAULTS, ReadOptions
from services.loader.format.checkpoint import Checkpoint
from services.loader.format.safetensors import TensorEntry
from services.loader.format.segment import Layout
from services.loader.load import load_private
from services.loader.pool.memory import PoolMemory
from shared.dtypes import TORCH_NAMES, packed_shape
from shared.errors import CheckpointInvalid

if TYPE_CHECKING:
    import torch


def load_tensors(
    path: Path | str, options: ReadOptions = DEFAULTS, *, rank: int = 0, ranks: int = 1, pool: PoolMemory | None = None
) -> dict[str, torch.Tensor]:
    """All tensors of a model directory, a safetensors file or a model's URL, by name, on the CPU; of a model that `thaw convert
    --tensor-parallel` has divided for `ranks`, the part of `rank`.

    They are writable views of one block of memory, which is given back when the last of them is gone; clone what should outlive the others
    alone. A process forked later shares that memory. Raises `CheckpointInvalid` (the message names the file and the remedy) or
    `InsufficientMemory`. `pool`: memory made beforehand (`services.loader.load.ready_pool`), used up by this load.
    """
    loaded = load_private(path, options, rank=rank, ranks=ranks, check=_check_dtypes, pool=pool)
    return {
        entry.name: _tensor(entry, loaded.memory, place.offset)
        for place in loaded.layout.places
        for entry in place.file.header.tensors
    }


class TensorStream:
    """As `load_tensors`, but each tensor comes as soon as it is whole, in the order of the files, while the others are being read.

    Reading begins at once, in threads of its own, and ends with `close`, at the latest when the tensors have been taken: iterate once, and in a
    `with` if you may leave early. Iterating raises what `load_tensors` raises.
    """

    def __init__(self, path: Path | str, options: ReadOptions = DEFAULTS, *, rank: int = 0, ranks: int = 1) -> None:
        self._changed = threading.Condition()
        self._begun: tuple[Layout, mmap.mmap] | None = None
        self._loaded = 0
        self._left = threading.Event()
        self._executor = ThreadPoolExecutor(1, "tensor-stream", initializer=_unbind)
        self._load = self._executor.submit(
            load_private,
            path,
            options,
            rank=rank,
            ranks=ranks,
            check=_check_dtypes,
            cancelled=self._left,
            on_begun=self._begin,
            on_loaded=self._advance,
        )
        self._load.add_done_callback(lambda _: self._tell())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            layout, memory = self._wait(lambda: self._begun is not None)
            for place in layout.places:
                for entry in sorted(place.file.header.tensors, key=lambda e: e.offset):
                    end = place.offset + entry.offset + entry.nbytes
                    self._wait(lambda: self._loaded >= end)  # noqa: B023  # called at once
                    yield entry.name, _tensor(entry, memory, place.offset)
            self._load.result()
        finally:
            self.close()

    def close(self) -> None:
        """Call off what has not been read; returns when no thread reads any more. Tensors that were taken stay as they are."""
        self._left.set()
        self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, layout: Layout, memory: mmap.mmap) -> None:
        self._begun = layout, memory
        self._tell()

    def _advance(self, loaded: int) -> None:
        with self._changed:
            self._loaded = max(self._loaded, loaded)
            self._changed.notify()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify()

    def _wait(self, come: Callable[[], bool]) -> tuple[Layout, mmap.mmap]:
        """Until this much has come, or raise what the load ended with."""
        with self._changed:
            self._changed.wait_for(lambda: self._load.done() or come())
        if self._load.done():
            self._load.result()
        assert self._begun is not None
        return self._begun


def _unbind() -> None:
    """Run on every core that some thread of this process may run on. An OpenMP runtime binds the thread that calls it to one of them, and the
    threads that this one starts inherit that: all would read on the core that is to copy meanwhile."""
    allowed: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            allowed |= os.sched_getaffinity(int(thread.name))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, allowed)


def _check_dtypes(checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        for entry in file.header.tensors:
            if entry.dtype not in TORCH_NAMES or packed_shape(entry.dtype, entry.shape) is None:
                raise CheckpointInvalid(
                    f"{file.path}: torch has no type for tensor {entry.name!r} of dtype {entry.dtype} and shape {list(entry.shape)}"
                )


def _tensor(entry: TensorEntry, memory: mmap.mmap, base: int) -> torch.Tensor:
    # The loader's processes never hold tensors: importing torch with this module would cost each of them a second and 200 MB.
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_NAMES[entry.dtype])
    shape = packed_shape(entry.dtype, entry.shape) or ()
    if entry.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    start, count = base + entry.offset, entry.nbytes // dtype.itemsize
    if start % dtype.itemsize:  # old files do not pad their headers, and torch's kernels want aligned elements
        return torch.frombuffer(bytearray(memory[start : start + entry.nbytes]), dtype=dtype).view(shape)
    # The tensor's storage refers to the mapping, which is unmapped with the last of them.
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
