"""Reads of a device's memory by its CUDA IPC handle, as in another process."""

from __future__ import annotations

import base64
import ctypes

from shared.contracts.segment import CudaIpcHandle
from tests.unit.loader.devices.fake_driver import FakeDriver
from weights.devices.port import Arena


def opened(arena: Arena, driver: FakeDriver, nbytes: int) -> bytes:
    handle = arena.handle()
    assert isinstance(handle, CudaIpcHandle)
    return ctypes.string_at(driver.open(base64.b64decode(handle.ipc_handle)), nbytes)
