"""Host memory page-locked for devices: each chunk once, for all of them, until its memory goes back."""

from __future__ import annotations

import threading

from services.loader.devices.driver import CudaDriver


class Pins:
    """Page-locked ranges by address. Registering takes long (the driver walks the pages): different chunks register at the same time."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._ranges: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(self._ranges.values())

    def pin(self, address: int, nbytes: int) -> None:
        """Raises `ValueError` if the address is pinned with another length: its memory was given back without `unpin`."""
        with self._lock:
            known = self._ranges.get(address)
            if known not in (None, nbytes):
                raise ValueError(f"{known} bytes are page-locked at {address:#x} already, {nbytes} were asked for")
            if known is not None:
                return
            self._ranges[address] = nbytes
        try:
            self._driver.register(address, nbytes)
        except BaseException:
            with self._lock:
                self._ranges.pop(address, None)
            raise

    def unpin(self, address: int) -> None:
        with self._lock:
            if self._ranges.pop(address, None) is None:
                return
        self._driver.unregister(address)

    def close(self) -> None:
        for address in list(self._ranges):
            self.unpin(address)
