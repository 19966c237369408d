"""Checkpoints as torch tensors in this process, for any program: no NATS, no mesh.

from services.loader.tensors import load_tensors
weights = load_tensors("/models/llama")
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from services.loader.adapters.reader import DEFAULTS, ReadOptions
from services.loader.format.checkpoint import Checkpoint
from services.loader.format.safetensors import TensorEntry
from services.loader.format.segment import Layout
from services.loader.load import PrivateLoad, load_private
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


def stream_tensors(
    path: Path | str, options: ReadOptions = DEFAULTS, *, rank: int = 0, ranks: int = 1
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """As `load_tensors`, each tensor as soon as it is whole and in the order of the files, while the others are being read. Whoever leaves early
    ends the reading."""
    coming, left = _Coming(), threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="stream-tensors") as executor:
        load = executor.submit(
            load_private,
            path,
            options,
            rank=rank,
            ranks=ranks,
            check=_check_dtypes,
            cancelled=left,
            on_begun=coming.begin,
            on_loaded=coming.advance,
        )
        load.add_done_callback(lambda _: coming.end())
        try:
            yield from coming.tensors(load)
        finally:
            left.set()


class _Coming:
    """A load in another thread, as the one sees it that takes its tensors."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun: tuple[Layout, mmap.mmap] | None = None
        self._loaded = 0
        self._ended = False

    def begin(self, layout: Layout, memory: mmap.mmap) -> None:
        with self._changed:
            self._begun = layout, memory
            self._changed.notify()

    def advance(self, loaded: int) -> None:
        with self._changed:
            self._loaded = max(self._loaded, loaded)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def tensors(self, load: Future[PrivateLoad]) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises what the load raised."""
        self._wait(lambda: self._begun is not None)
        if self._begun is None:
            load.result()
        assert self._begun is not None
        layout, memory = self._begun
        for place in layout.places:
            for entry in sorted(place.file.header.tensors, key=lambda e: e.offset):
                end = place.offset + entry.offset + entry.nbytes
                self._wait(lambda: self._loaded >= end)  # noqa: B023  # called at once
                if self._ended:
                    load.result()
                yield entry.name, _tensor(entry, memory, place.offset)
        load.result()

    def _wait(self, come: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or come())


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
