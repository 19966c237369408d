"""Page-lock host memory: each chunk once for all devices, until it is freed."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from itertools import pairwise

from weights.devices.driver import CudaDriver
from weights.devices.grouping import Run


class Pins:
    """Page-locked ranges by address.

    Registering takes long (the driver walks the pages): different chunks register at the same time.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._ranges: dict[int, int] = {}
        self._starts: list[int] = []

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(self._ranges.values())

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock a range of host memory.

        Raises:
            ValueError: The address is pinned with another length: its memory was freed without
                `unpin`.
        """
        with self._lock:
            known = self._ranges.get(address)
            if known not in (None, nbytes):
                raise ValueError(f"{known} bytes are page-locked at {address:#x} already, {nbytes} were asked for")
            if known is not None:
                return
            self._ranges[address] = nbytes
            insort(self._starts, address)
        try:
            self._driver.register(address, nbytes)
        except BaseException:
            with self._lock:
                self._forget(address)
            raise

    def runs(self, offset: int, address: int, nbytes: int) -> list[Run]:
        """Cut the range where one page-locked range ends and the next begins.

        Parts outside page-locked ranges are not cut.
        """
        end, runs = address + nbytes, list[Run]()
        with self._lock:
            at = max(bisect_right(self._starts, address) - 1, 0)
            cuts = [c for start in self._starts[at:] if start < end for c in (start, start + self._ranges[start])]
            for start, stop in pairwise(sorted({address, *(c for c in cuts if address < c < end), end})):
                before = bisect_right(self._starts, start) - 1
                pin = self._starts[before] if before >= 0 else 0
                inside = before >= 0 and start < pin + self._ranges[pin]
                runs.append(Run(offset + start - address, start, stop - start, pin if inside else 0))
        return runs

    def unpin(self, address: int) -> None:
        with self._lock:
            if address not in self._ranges:
                return
            self._forget(address)
        self._driver.unregister(address)

    def close(self) -> None:
        for address in list(self._ranges):
            self.unpin(address)

    def _forget(self, address: int) -> None:
        del self._ranges[address]
        self._starts.remove(address)
