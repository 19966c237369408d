"""All devices of a node that weights are copied to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

from shared.errors import DeviceMissing
from weights.devices.opening import Devices
from weights.devices.pacing import Pacer
from weights.devices.port import Contents, Device
from weights.store.cost import Tier
from weights.store.residency import KnownUnits
from weights.store.separate import SeparateDevice
from weights.store.units import cut_units


class NodeDevices:
    """The devices that weights are copied to: GPUs, and cpu devices with memory of their own.

    GPUs are opened when they are first used. Each then gets what the others have: the prices of
    reloads, and the connections for copies between devices.

    Attributes:
        known: The units of weights, which the devices share.
    """

    def __init__(
        self,
        separate: Mapping[str, SeparateDevice],
        cuda: Devices | None = None,
        known: KnownUnits | None = None,
        pacers: Mapping[frozenset[str], Pacer] = MappingProxyType({}),
    ) -> None:
        """Create them, with GPUs not yet opened.

        Args:
            separate: Cpu devices with memory of their own.
            cuda: The GPUs; None: there are none.
            known: Units of weights.
            pacers: Pacers of the links between two devices.
        """
        self.separate, self._cuda, self._pacers = separate, cuda, pacers
        self.known = known or KnownUnits()
        self._tier_of: Callable[[str], Tier] | None = None
        self._likelihoods: Mapping[str, float] | None = None
        self._lock = threading.Lock()
        self._paged: Mapping[str, SeparateDevice] = MappingProxyType(dict(separate))
        self._connect()

    @property
    def paged(self) -> Mapping[str, SeparateDevice]:
        """Return the devices that keep units: cpu devices, and the GPUs that are open."""
        return self._paged

    def get(self, device_id: str) -> Device:
        """Return the device, opened if it is a GPU. Raises as `Devices.get`."""
        if (found := self._paged.get(device_id)) is not None:
            return found
        if self._cuda is None:
            raise DeviceMissing(f"{device_id} is no device of this node that weights are copied to")
        opened = self._cuda.get(device_id)
        if isinstance(opened, SeparateDevice):
            self._add(opened)
        return opened

    def _add(self, device: SeparateDevice) -> None:
        """Let a GPU that was opened take part."""
        with self._lock:
            if device.device_id in self._paged:
                return
            if self._tier_of is not None:
                device.price_by(self._tier_of)
            device.expect(self._likelihoods)
            self._paged = MappingProxyType({**self._paged, device.device_id: device})
            self._connect()

    def _connect(self) -> None:
        """Let each device copy from all others."""
        for name, device in self._paged.items() if len(self._paged) > 1 else ():
            others = {other: d for other, d in self._paged.items() if other != name}
            pacers = {o: p for o in others if (p := self._pacers.get(frozenset((name, o)))) is not None}
            device.connect(others, pacers)

    def price_by(self, tier_of: Callable[[str], Tier]) -> None:
        """Price reloads by the tier that `tier_of` returns for weights."""
        with self._lock:
            self._tier_of = tier_of
            for device in self._paged.values():
                device.price_by(tier_of)

    def expect(self, likelihoods: Mapping[str, float] | None) -> None:
        """Price reloads by the likelihoods of weights, by their id; None: all are equal."""
        with self._lock:
            self._likelihoods = likelihoods
            for device in self._paged.values():
                device.expect(likelihoods)

    def count_missing(self, weights_id: str, contents: Contents) -> dict[str, int]:
        """Return the bytes that devices lack of weights, where they or others have some units.

        A GPU that is not open yet lacks all of them.
        """
        found = {n: missing for n, d in self._paged.items() if (missing := d.count_missing(weights_id, contents)) is not None}
        if found and self._cuda is not None and any(d not in self.separate for d in found):
            total = sum(u.nbytes for u in cut_units(contents.tensors, {}, weights_id))
            found |= dict.fromkeys(self._cuda.unopened, total)
        return found

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
