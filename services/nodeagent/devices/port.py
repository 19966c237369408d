"""What every kind of device can do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class DeviceInfo:
    """`name` as people know it; `uuid` where the hardware has one."""

    device_id: str
    kind: Literal["cpu", "cuda"]
    name: str
    total_bytes: int
    budget_bytes: int
    uuid: str = ""


class Device(Protocol):
    """Both readings raise `DeviceFailed` where the driver gives no answer: a GPU can be lost while its node goes on."""

    @property
    def info(self) -> DeviceInfo: ...

    def private_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        """Bytes of this device that each process holds for itself; processes that are gone, or hold none, are left out. Blocking."""
        ...

    def used_bytes(self, private: int, shared: int) -> int:
        """Bytes in use, given what was measured of our processes and of the weight segments they share. Blocking."""
        ...
