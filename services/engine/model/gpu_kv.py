"""Memory of a KV cache on a GPU, in pages that the loader lends (ADR 0107).

A sequence has one range of addresses, in which all layers of a token are together. Memory of 2 MiB
is mapped there, one page after the other, as the sequence grows. The range of a sequence that has
ended keeps its memory for the next one, until another range or the loader needs it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from services.engine.domain.step_planning import BLOCK_TOKENS, blocks_for
from services.engine.model import gpu_units
from services.engine.model.device_segment import see_as_bytes
from shared.errors import EngineFailed, ThawError
from weights.devices.mapped_range import MappedRange
from weights.devices.virtual_memory import Allocation, VirtualMemory
from weights.kv_lease import PAGE_BYTES

log = logging.getLogger(__name__)
STRIDE_BYTES = PAGE_BYTES // BLOCK_TOKENS
"""The bytes of a token are a multiple of this, so that a block has whole pages."""


class Gpu(Protocol):
    """The GPU that the engine computes on."""

    def use(self) -> AbstractContextManager[tuple[VirtualMemory, torch.device]]:
        """Make it current in this thread, within the block."""
        ...

    def see(self, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return a range of addresses as bytes. The first address must have memory."""
        ...

    def synchronize(self) -> None:
        """Wait for all work that this thread has issued."""
        ...


class TorchGpu:
    """The GPU with a PCI bus id, through torch and the driver."""

    def __init__(self, bus_id: str) -> None:
        self._bus_id = bus_id

    def use(self) -> AbstractContextManager[tuple[VirtualMemory, torch.device]]:
        return gpu_units.gpu_memory(self._bus_id)

    def see(self, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
        return see_as_bytes(address, nbytes, device)[0]

    def synchronize(self) -> None:
        with self.use() as (_, device):
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


@dataclass(frozen=True)
class _Place:
    """Where a layer is in the bytes of a token, from `offset` on: keys, then values."""

    offset: int
    heads: int
    width: int
    dtype: torch.dtype


@dataclass(eq=False)
class KvRange:
    """Addresses of one sequence.

    Attributes:
        pages: Mapped without gaps from the first address on.
    """

    memory: GpuKvMemory
    units: MappedRange | None = None
    pages: list[Allocation] = field(default_factory=list)
    seen: torch.Tensor | None = None
    layers: dict[int, torch.Tensor] = field(default_factory=dict)

    def cover(self, tokens: int) -> None:
        """Map memory for the first `tokens` tokens.

        Raises:
            InsufficientMemory: The GPU is full: others than its loader's engines allocate there.
        """
        missing = blocks_for(tokens) * self.memory.block_pages - len(self.pages)
        if missing > 0:
            self.memory.map_more(self, missing)

    def layer(self, layer: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the keys and values of a layer: [2, heads, tokens of the context, width].

        Call `cover` before: only the tokens that it has mapped have memory, and others fault.
        """
        if layer not in self.layers:
            assert self.seen is not None
            place = self.memory.place(layer, heads, width, dtype)
            stride = self.memory.token_bytes // dtype.itemsize
            size = (2, heads, self.seen.numel() // self.memory.token_bytes, width)
            strides = (heads * width, width, stride, 1)
            self.layers[layer] = self.seen.view(dtype).as_strided(size, strides, place.offset // dtype.itemsize)
        return self.layers[layer]


class GpuKvMemory:
    """The memory of the lent pages, and the ranges that it is mapped into.

    `add` may be called from any thread, and `take_back`. The other methods belong to the computing
    thread.

    Attributes:
        token_bytes: Bytes from one token to the next.
        block_bytes: Bytes of a block of tokens.
        block_pages: Pages of a block.
    """

    def __init__(self, gpu: Gpu, token_bytes: int, context: int) -> None:
        """Create the memory, without pages.

        Args:
            gpu: The GPU.
            token_bytes: Bytes of keys and values for each token.
            context: Most tokens of a sequence.
        """
        self._gpu = gpu
        self.token_bytes = -(-token_bytes // STRIDE_BYTES) * STRIDE_BYTES
        self.block_bytes = self.token_bytes * BLOCK_TOKENS
        self.block_pages = self.block_bytes // PAGE_BYTES
        self._range_bytes = blocks_for(context) * self.block_bytes
        self._lock = threading.Lock()
        self._free: list[Allocation] = []
        self._allocated = self._lent = self._for_others = 0
        self._spare: deque[KvRange] = deque()
        self._places: dict[int, _Place] = {}

    @property
    def allocated_pages(self) -> int:
        """Return the pages that have memory."""
        with self._lock:
            return self._allocated

    # -- pages -------------------------------------------------------------------------------------

    def add(self, pages: int) -> int:
        """Allocate memory for more lent pages; return the number of pages that got memory."""
        with self._lock:
            self._lent += pages
            missing = self._count_missing()
        refused = min(pages, missing - self._allocate(missing))
        with self._lock:
            self._lent -= refused
        return pages - refused

    def remove(self, pages: int) -> None:
        """Release the memory of pages that are about to be returned. May wait for the GPU.

        Ranges in use keep theirs: the caller has counted that they need no more than what is left.
        """
        with self._lock:
            self._lent -= pages
        if left := self._release_excess():
            log.warning("sequences have more memory than the KV cache has pages", extra={"pages": left})

    def keep_for_others(self, pages: int) -> None:
        """Leave so many of the lent pages without memory, because LoRA adapters use theirs."""
        with self._lock:
            has_changed, self._for_others = pages != self._for_others, pages
            missing = self._count_missing() if has_changed else 0
        if missing and (made := self._allocate(missing)) < missing:
            log.warning("the GPU has no memory for pages of the KV cache", extra={"pages": missing - made})
        self._release_excess()

    def _count_missing(self) -> int:
        """Return how many pages lack memory, and count them as allocated. Needs the lock."""
        missing = max(0, self._lent - self._for_others - self._allocated)
        self._allocated += missing
        return missing

    def _allocate(self, pages: int) -> int:
        """Allocate up to `pages` pages of `_count_missing`, and return their number."""
        if not pages:
            return 0
        made: list[Allocation] = []
        try:
            with self._gpu.use() as (memory, device):
                for _ in range(pages):
                    made.append(memory.create(device.index or 0, PAGE_BYTES, exportable=False))  # noqa: PERF401  # as far as it goes
        except ThawError as e:
            log.debug("failed to allocate memory for the KV cache", extra={"error": e.message})
        with self._lock:
            self._free += made
            self._allocated -= pages - len(made)
        return len(made)

    def _release_excess(self) -> int:
        """Release memory beyond the lent pages, as far as no sequence has it.

        Returns:
            The number of pages that sequences have beyond the lent ones.
        """
        with self._lock:
            excess = max(0, self._allocated - max(0, self._lent - self._for_others))
            if not (excess and (self._free or any(r.pages for r in tuple(self._spare)))):
                return excess
            self._allocated -= excess  # so that `add` does not rely on what is about to be released
        with self._gpu.use() as (memory, _):
            found = self._find_free(excess)
            for allocation in found:
                memory.release(allocation)
        with self._lock:
            self._allocated += excess - len(found)
        return excess - len(found)

    def _find_free(self, pages: int) -> list[Allocation]:
        """Return up to `pages` pages that are mapped nowhere, after unmapping some if need be."""
        with self._lock:
            kept = max(0, len(self._free) - pages)
            found, self._free = self._free[kept:], self._free[:kept]
        if len(found) < pages and self._spare:
            self._gpu.synchronize()  # cuMemUnmap does not wait for work that uses the memory
            for spare in tuple(self._spare):  # the one that has been unused for longest first
                while spare.pages and len(found) < pages:
                    assert spare.units is not None
                    spare.units.unmap((len(spare.pages) - 1) * PAGE_BYTES)
                    found.append(spare.pages.pop())
        return found

    # -- ranges ------------------------------------------------------------------------------------

    def take(self) -> KvRange:
        """Return addresses for a sequence, perhaps with memory of an earlier one."""
        try:
            return self._spare.pop()
        except IndexError:
            return KvRange(self)

    def take_back(self, found: KvRange) -> None:
        """Keep the range of a sequence that has ended, with its memory. Takes no lock."""
        self._spare.append(found)

    def map_more(self, found: KvRange, pages: int) -> None:
        """Map memory to the next `pages` pages of a range. Raises as `KvRange.cover`."""
        with self._gpu.use() as (memory, device):
            if found.units is None:
                found.units = MappedRange(memory, device.index or 0, self._range_bytes)
            allocations = self._find_free(pages)
            try:
                for _ in range(pages - len(allocations)):  # a sequence that was cut short keeps its memory
                    allocations.append(memory.create(device.index or 0, PAGE_BYTES, exportable=False))
                    with self._lock:
                        self._allocated += 1
                found.units.map_writable(len(found.pages) * PAGE_BYTES, PAGE_BYTES, allocations)
            except BaseException:
                with self._lock:
                    self._free += allocations
                raise
            found.pages += allocations
            if found.seen is None:
                found.seen = self._gpu.see(found.units.address, self._range_bytes, device)

    def place(self, layer: int, heads: int, width: int, dtype: torch.dtype) -> _Place:
        """Return where a layer is in the bytes of a token: the next free ones, if it is new."""
        if (found := self._places.get(layer)) is None:
            offset = sum(2 * p.heads * p.width * p.dtype.itemsize for p in self._places.values())
            found = _Place(offset, heads, width, dtype)
            if offset + 2 * heads * width * dtype.itemsize > self.token_bytes:
                raise EngineFailed(f"Keys and values of a token have more than the {self.token_bytes} bytes that were computed")
            self._places[layer] = found
        return found

    def close(self) -> None:
        """Release all memory. No sequence has any, and no work uses it."""
        self._gpu.synchronize()
        with self._gpu.use() as (memory, _):
            for spare in self._spare:
                if spare.units is not None:
                    spare.units.close()
                self._free += spare.pages
            for allocation in self._free:
                memory.release(allocation)
        self._allocated -= len(self._free)
        self._spare.clear()
        self._free.clear()


OpenGpu = Callable[[str], Gpu]
open_gpu: OpenGpu = TorchGpu
"""Returns the GPU with a PCI bus id."""
