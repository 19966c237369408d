"""Measure the device memory of an engine's processes, to verify bookings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.nodeagent.devices.port import Device
from services.nodeagent.suspend.memory import footprint
from services.nodeagent.suspend.port import Target


class MemoryUsage:
    """Measures device memory.

    On cpu: PSS including weights in shared memory (a page of n users counts 1/n). On cuda: NVML's
    accounting.
    """

    def __init__(self, devices: Mapping[str, Device]) -> None:
        self._devices = devices

    def used_bytes(self, target: Target) -> int:
        """Return the bytes that the target uses on its devices. Blocking.

        Raises:
            PermissionDenied: This process may not read the other one.
            DeviceFailed: The device cannot be read.
        """
        if not target.on_cuda:
            return footprint(target.pids).pss
        return sum(self.by_process(target.device_ids, target.pids).values())

    def used_bytes_with_swap(self, target: Target) -> int:
        """Return `used_bytes`, on cpu plus swap. Blocking.

        This is the memory in use if the engine accessed all its pages.
        """
        if target.on_cuda:
            return self.used_bytes(target)
        now = footprint(target.pids)
        return now.pss + now.swap

    def by_process(self, device_ids: Iterable[str], pids: Iterable[int]) -> dict[int, int]:
        """Return the bytes on these devices by process, without processes that use none."""
        found: dict[int, int] = {}
        for device_id in device_ids:
            device = self._devices.get(device_id)
            if device is None or device.info.kind != "cuda":
                continue
            for pid, nbytes in device.private_bytes(pids).items():
                found[pid] = found.get(pid, 0) + nbytes
        return found
