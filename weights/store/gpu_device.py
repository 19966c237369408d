"""A GPU whose weights are units that outlive their instances (ADR 0060).

`SeparateDevice` keeps account, copies and verifies; here are the memory and its limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from shared.contracts.segment import GpuUnitsHandle, UnitPages
from shared.errors import DeviceFailed, NotFound
from weights.devices.cuda_virtual_memory import load_virtual_memory
from weights.devices.driver import CudaDriver, DeviceFacts
from weights.devices.pinning import Pins
from weights.devices.port import Place, Priority
from weights.devices.virtual_memory import VirtualMemory
from weights.store.arena import PagedArena
from weights.store.auditing import Snapshot
from weights.store.gpu_memory import GpuMemory
from weights.store.residency import KnownUnits
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES
from weights.store.usage import PagesInUse

log = logging.getLogger(__name__)


class GpuDevice(SeparateDevice):
    """The units on one GPU.

    Engines on a GPU allocate memory that is not the store's. So at most `reuse_bytes` of units
    without an instance stay: this much has to be left out of what instances may book. KV caches may
    borrow pages, which are then an account of memory that the engines allocate (ADR 0107).
    """

    def __init__(
        self,
        driver: CudaDriver,
        virtual_memory: VirtualMemory,
        facts: DeviceFacts,
        group_bytes: int,
        pins: Pins,
        *,
        reuse_bytes: int,
        lends_kv: bool = False,
        verify: bool = False,
        known: KnownUnits | None = None,
    ) -> None:
        """Open the device.

        Args:
            pins: Page-locked host memory.
            reuse_bytes: The most bytes of units without an instance.
            lends_kv: Lend pages to KV caches (ADR 0107).

        The other arguments are as there.

        Raises:
            DeviceFailed: The GPU has no memory that can be exported.
        """
        self._driver, self._facts, self._pins, self._reuse_pages = driver, facts, pins, reuse_bytes // PAGE_BYTES
        self._lends_kv = lends_kv
        self._units = GpuMemory(driver, virtual_memory, facts.index, pins)
        super().__init__(
            f"cuda:{facts.index}",
            facts.total_bytes,
            None,
            verify=verify,
            known=known,
            group_bytes=group_bytes,
            memory=self._units,
        )
        self._others_bytes = 0
        self._measure_others()

    def pin(self, address: int, nbytes: int) -> None:
        self._driver.use(self._facts.index)
        self._pins.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        self._pins.unpin(address)

    @property
    def bus_id(self) -> str:
        return self._facts.bus_id

    @property
    def lends_kv(self) -> bool:
        return self._lends_kv

    def pages_of(self, arena: PagedArena, indexes: Sequence[int]) -> tuple[UnitPages, ...]:
        """Return these units without extents: engines map them by descriptor."""
        return tuple(UnitPages(unit=i, extents=()) for i in indexes)

    def handle_of(self, arena: PagedArena) -> GpuUnitsHandle:
        layout = arena.layout()
        return GpuUnitsHandle(
            device=layout.device,
            nbytes=layout.nbytes,
            bus_id=self._facts.bus_id,
            units=layout.units,
            lends_kv=self._lends_kv,
        )

    def allocate(self, place: Place, priority: Priority = Priority.REQUEST) -> PagedArena:
        arena = super().allocate(place, priority)
        self._measure_others()
        return arena

    def export(self, arena: PagedArena, indexes: Sequence[int], pid: int) -> list[int]:
        """Return descriptors of complete units of an arena for a process. The caller closes them.

        Raises:
            EngineFailed: There is no such process.
            NotFound: The arena was released, or lacks one of the units.
        """
        with self.changed:
            if not arena.is_open or not all(0 <= i < len(arena.keys) and i not in arena.missing for i in indexes):
                raise NotFound(f"The weights are not on {self.device_id} any more. Attach again")
            stored = [self.store().units[arena.keys[i]] for i in indexes]
            found: list[int] = []
            try:
                for unit in stored:
                    found += [self._units.export(unit, pid)]
            except BaseException:
                for descriptor in found:
                    os.close(descriptor)
                raise
            return found

    def remove(self, arena: PagedArena) -> None:
        """Release an arena's units, and free those beyond the limit, cheapest to load first."""
        super().remove(arena)
        self._limit()
        self._measure_others()

    def unhold(self, holder: str) -> None:
        """Release the units of `hold`, and free those beyond the limit."""
        with self.changed:
            has_held = holder in self._opening
        super().unhold(holder)
        if has_held:
            try:
                self._limit()
            except DeviceFailed as e:  # of a broken context, whose memory is freed with the process
                log.warning("failed to free units beyond the limit", extra={"device": self.device_id, "error": e.message})

    def _limit(self) -> None:
        with self.changed:
            self._pages.limit_reusable(self._reuse_pages)
            self._units.free(self._pages.store.free)

    def pages(self) -> PagesInUse:
        """Return how the pages are used now. Those that others have the memory of do not count."""
        used = super().pages()
        others = min(self._others_bytes, used.free_bytes) // PAGE_BYTES * PAGE_BYTES
        return replace(used, total_bytes=used.total_bytes - others, free_bytes=used.free_bytes - others)

    def begin_audit(self) -> Snapshot:
        self._measure_others()
        return super().begin_audit()

    def _measure_others(self) -> None:
        """Measure what others have allocated on the device: engines, and CUDA itself. Blocks.

        Engines have allocated the memory of all lent pages, but for messages on their way.
        """
        with contextlib.suppress(DeviceFailed):  # of a broken context, which the next copy reports
            before = self._own_bytes()
            self._driver.use(self._facts.index)
            in_use = self._facts.total_bytes - self._driver.free_bytes()
            # Other threads of the loader allocate and free units meanwhile.
            self._others_bytes = max(0, in_use - max(before, self._own_bytes()))

    def _own_bytes(self) -> int:
        """Return the bytes of all units, and of lent pages."""
        return self._units.allocated_bytes() + self.store().lent_pages * PAGE_BYTES


def gpu_devices(
    reuse_bytes: int,
    known: KnownUnits,
    *,
    lends_kv: bool = False,
    verify: bool = False,
    load: Callable[[], VirtualMemory] = load_virtual_memory,
) -> Callable[[CudaDriver, DeviceFacts, int, Pins], GpuDevice]:
    """Return the function that opens GPUs whose units outlive their instances."""

    def open_device(driver: CudaDriver, facts: DeviceFacts, group_bytes: int, pins: Pins) -> GpuDevice:
        return GpuDevice(
            driver, load(), facts, group_bytes, pins, reuse_bytes=reuse_bytes, lends_kv=lends_kv, verify=verify, known=known
        )

    return open_device
