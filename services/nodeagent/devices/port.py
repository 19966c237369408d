"""The interface of a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class DeviceInfo:
    """Facts about a device.

    Attributes:
        name: The product name.
        uuid: Empty if the hardware has none.
        memory: Whether weights are in the host's memory (unified, cpu devices only) or are copied
            into pages of the device's own (separate).
    """

    device_id: str
    kind: Literal["cpu", "cuda"]
    name: str
    total_bytes: int
    budget_bytes: int
    uuid: str = ""
    memory: Literal["unified", "separate"] = "unified"


class Device(Protocol):
    """A device.

    Both readings raise `DeviceFailed` if the driver does not answer: a GPU can be lost while the
    node keeps running.
    """

    @property
    def info(self) -> DeviceInfo: ...

    def private_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        """Private bytes of each process; processes without any are left out.

        Blocking.
        """
        ...

    def used_bytes(self, private_bytes: int, shared_bytes: int) -> int:
        """Return the bytes of the device that are in use.

        Blocking.

        Args:
            private_bytes: Measured private memory of all engines.
            shared_bytes: Weights, each segment once.
        """
        ...
