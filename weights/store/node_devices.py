"""All devices of a node that weights are copied to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shared.errors import DeviceMissing
from weights.devices.opening import Devices
from weights.devices.pacing import Pacer
from weights.devices.port import Device
from weights.store.residency import KnownUnits
from weights.store.separate import SeparateDevice


class NodeDevices:
    """The devices that weights are copied to: GPUs, and cpu devices with memory of their own.

    `known`: the units of weights, which the separate devices share.
    """

    def __init__(
        self,
        separate: Mapping[str, SeparateDevice],
        cuda: Devices | None = None,
        known: KnownUnits | None = None,
        pacers: Mapping[frozenset[str], Pacer] = MappingProxyType({}),
    ) -> None:
        """`pacers`: of the links between two separate devices."""
        self.separate, self._cuda = separate, cuda
        for name, device in separate.items() if len(separate) > 1 else ():
            others = {other: d for other, d in separate.items() if other != name}
            device.connect(others, {o: p for o in others if (p := pacers.get(frozenset((name, o)))) is not None})
        self.known = known or KnownUnits()

    def get(self, device_id: str) -> Device:
        """Return the device, opened if it is a GPU. Raises as `Devices.get`."""
        if (found := self.separate.get(device_id)) is not None:
            return found
        if self._cuda is None:
            raise DeviceMissing(f"{device_id} is no device of this node that weights are copied to")
        return self._cuda.get(device_id)

    @property
    def opened(self) -> tuple[Device, ...]:
        return (*self.separate.values(), *(self._cuda.opened if self._cuda is not None else ()))

    def pin(self, address: int, nbytes: int) -> None:
        if self._cuda is not None:
            self._cuda.pin(address, nbytes)

    def close(self) -> None:
        for device in self.separate.values():
            device.close()
        if self._cuda is not None:
            self._cuda.close()
