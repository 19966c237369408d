"""Device memory of an engine's processes; bookings are verified by it."""

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

    def used(self, target: Target) -> int:
        """Bytes of the target's devices. Blocking.

        Raises:
            PermissionDenied: This process may not read the other one.
            DeviceFailed: The device cannot be read.
        """
        if not target.on_cuda:
            return footprint(target.pids).pss
        return sum(self.by_process(target.device_ids, target.pids).values())

    def held(self, target: Target) -> int:
        """As `used`; on cpu plus swap. Blocking.

        This is the memory in use if the engine touched everything.
        """
        if target.on_cuda:
            return self.used(target)
        now = footprint(target.pids)
        return now.pss + now.swap

    def by_process(self, device_ids: Iterable[str], pids: Iterable[int]) -> dict[int, int]:
        """Bytes on these devices by process; processes without any are left out."""
        found: dict[int, int] = {}
        for device_id in device_ids:
            device = self._devices.get(device_id)
            if device is None or device.info.kind != "cuda":
                continue
            for pid, nbytes in device.private_bytes(pids).items():
                found[pid] = found.get(pid, 0) + nbytes
        return found
