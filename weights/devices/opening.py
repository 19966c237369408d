"""Open this machine's CUDA devices when weights are first loaded to them.

A CUDA context costs hundreds of MB, and a machine without a GPU imports nothing of CUDA.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from shared.errors import DeviceMissing, ThawError
from weights.devices.cuda import CudaDevice
from weights.devices.driver import CudaDriver, DeviceFacts
from weights.devices.pinning import Pins
from weights.devices.port import Device

log = logging.getLogger(__name__)
_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Paths that the driver creates on Linux, and on Windows' subsystem for it."""
_CUDA = re.compile(r"^cuda:(\d+)$")


def has_driver() -> bool:
    """True if an NVIDIA driver is here, without asking it."""
    return any(node.exists() for node in _NODES)


def load_driver() -> CudaDriver:
    """The real one.

    Raises `DeviceMissing` with the remedy. Devices are numbered as NVML numbers them: by their
    place on the bus.
    """
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    from weights.devices.cuda_runtime import load_cuda  # only where a GPU is wanted

    return load_cuda()


Open = Callable[[CudaDriver, DeviceFacts, int, Pins], Device]
"""Opens a device: its driver, its facts, the bytes of a group of copies, page-locked memory."""


def with_arenas(driver: CudaDriver, facts: DeviceFacts, group_bytes: int, pins: Pins) -> Device:
    """Open a device whose memory is one arena for each load (ADR 0027)."""
    return CudaDevice(driver, facts, group_bytes, pins=pins)


class Devices:
    """The open devices.

    Methods may be called from any thread. The pool's hooks (`PoolMemory`) cost nothing before a
    device is open.
    """

    def __init__(
        self, load: Callable[[], CudaDriver], group_bytes: Callable[[CudaDriver, DeviceFacts], int], open_device: Open = with_arenas
    ) -> None:
        """Create it without open devices.

        Args:
            load: Loads the driver.
            group_bytes: Returns the elbow of a device's curve (`probe.group_bytes`).
            open_device: Opens a device.
        """
        self._load, self._group_bytes, self._open_device = load, group_bytes, open_device
        self._lock = threading.Lock()
        self._driver: CudaDriver | None = None
        self._pins: Pins | None = None
        self._index = 0
        self._open: dict[str, Device] = {}
        self._closed = False

    def get(self, device_id: str) -> Device:
        """Opened if it is not yet, which takes seconds on its first use on this machine.

        Raises `DeviceMissing` or what CUDA says.
        """
        with self._lock:
            if (found := self._open.get(device_id)) is not None:
                return found
            match = _CUDA.match(device_id)
            if match is None or self._closed:
                raise DeviceMissing(f"{device_id} is no CUDA device that can be opened now")
            if self._driver is None:
                self._driver = self._load()
            index = int(match.group(1))
            if index >= self._driver.count():
                raise DeviceMissing(f"{device_id} is not there: CUDA sees {self._driver.count()} devices")
            facts = self._driver.facts(index)
            group = self._group_bytes(self._driver, facts)
            if self._pins is None:
                self._index, self._pins = index, Pins(self._driver)
            self._open[device_id] = opened = self._open_device(self._driver, facts, group, self._pins)
            log.info("device opened", extra={"device": device_id, "bus": facts.bus_id, "group_bytes": group})
            return opened

    @property
    def opened(self) -> tuple[Device, ...]:
        return tuple(self._open.values())

    @property
    def unopened(self) -> tuple[str, ...]:
        """Return the devices that are not open, once one is: the driver is not loaded before."""
        driver = self._driver
        every = range(driver.count()) if driver is not None and self._open else ()
        return tuple(name for name in (f"cuda:{i}" for i in every) if name not in self._open)

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock a chunk, once a device is open.

        One that cannot be locked is copied from all the same, more slowly.
        """
        if (driver := self._driver) is None or (pins := self._pins) is None:
            return
        try:
            driver.use(self._index)
            pins.pin(address, nbytes)
        except ThawError as e:
            log.warning("failed to page-lock memory; see ulimit -l", extra={"bytes": nbytes, "error": e.message})

    def unpin(self, address: int, nbytes: int) -> None:
        """Before the chunk's memory is punched out."""
        if (driver := self._driver) is None or (pins := self._pins) is None:
            return
        try:
            driver.use(self._index)
            pins.unpin(address)
        except ThawError as e:  # of a context that is broken; nothing is copied in it any more
            log.warning("failed to unlock page-locked memory", extra={"bytes": nbytes, "error": e.message})

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for device in self._open.values():
                device.close()
            self._open.clear()
            if self._pins is not None:
                with contextlib.suppress(ThawError):
                    self._pins.close()
            self._driver = self._pins = None
