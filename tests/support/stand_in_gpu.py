"""A GPU for the KV cache of an engine: the stand-in driver's, whose memory is host memory.

It shows bookkeeping and the order of calls. An access to addresses without memory ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from tests.support.fake_virtual_memory import GRANULARITY, FakeVirtualMemory
from tests.support.mapped_gpu_units import see_as_bytes


class StandInGpu:
    """A GPU with the memory of `pages` pages.

    Attributes:
        memory: The stand-in driver.
        waits: How often the engine has waited for its work.
    """

    def __init__(self, pages: int) -> None:
        self.memory = FakeVirtualMemory(pages * GRANULARITY)
        self.waits = 0

    def use(self) -> AbstractContextManager[tuple[FakeVirtualMemory, torch.device]]:
        return self._use()

    @contextmanager
    def _use(self) -> Iterator[tuple[FakeVirtualMemory, torch.device]]:
        yield self.memory, torch.device("cpu")

    def see(self, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
        return see_as_bytes(address, nbytes, device)[0]

    def synchronize(self) -> None:
        self.waits += 1
        self.memory.synchronize()

    def issue(self) -> None:
        """Take note of work that uses all mapped memory until the engine waits for it."""
        for address, mapping in self.memory.mappings.items():
            self.memory.issue(address, mapping.nbytes)

    @property
    def mapped_pages(self) -> int:
        return sum(m.nbytes for m in self.memory.mappings.values()) // GRANULARITY

    @property
    def allocated_pages(self) -> int:
        return len(self.memory.handles)
