"""Nodes of two devices that copy units from each other, on cpu and on the stand-in GPU."""

from __future__ import annotations

from tests.unit.loader.store.gpu import Gpu, Gpus
from tests.unit.loader.store.separate_devices import GPUS, PREFIX
from weights.devices.pacing import Pacer
from weights.store.generations import file_name
from weights.store.node_devices import NodeDevices
from weights.store.residency import KnownUnits
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES


class Node:
    """Two devices of 8 pages each, which copy units from each other."""

    one: SeparateDevice
    two: SeparateDevice
    devices: NodeDevices

    def becomes_reusable(self, count: int) -> bool:
        """Wait until this number of units on the first device have no holder."""

        def are_reusable() -> bool:
            return sum(u.is_reusable for u in self.one.store().units.values()) == count

        with self.one.changed:
            return self.one.changed.wait_for(are_reusable, 30.0)

    def close(self) -> None:
        for device in (self.one, self.two):
            assert device.audit() == []
        self.devices.close()


class CpuNode(Node):
    def __init__(self, *, peer: float | None = None, verify: bool = False) -> None:
        known = KnownUnits()
        names = [file_name(PREFIX, d, "boot") for d in ("cpu:1", "cpu:2")]
        self.one = SeparateDevice("cpu:1", 8 * PAGE_BYTES, names[0], known=known)
        self.two = SeparateDevice("cpu:2", 8 * PAGE_BYTES, names[1], known=known, verify=verify)
        pacers = {frozenset(("cpu:1", "cpu:2")): Pacer(peer)} if peer is not None else {}
        self.devices = NodeDevices({"cpu:1": self.one, "cpu:2": self.two}, known=known, pacers=pacers)


class GpuNode(Node):
    def __init__(self, *, peer: float | None = None, verify: bool = False, reuse_pages: int | None = None) -> None:
        known = KnownUnits()
        self.gpus = self.make_gpus(known, verify=verify, reuse_pages=reuse_pages)
        pacers = {frozenset(("cuda:0", "cuda:1")): Pacer(peer)} if peer is not None else {}
        self.devices = NodeDevices({}, self.gpus.devices, known, pacers)
        self.one, self.two = self._open("cuda:0"), self._open("cuda:1")

    def make_gpus(self, known: KnownUnits, *, verify: bool, reuse_pages: int | None = None) -> Gpus:
        return Gpus(8, 2, verify=verify, known=known, reuse_pages=reuse_pages)

    def _open(self, device_id: str) -> SeparateDevice:
        found = self.devices.get(device_id)
        assert isinstance(found, SeparateDevice)
        GPUS[found] = Gpu(machine=self.gpus, device_id=device_id)
        return found

    def close(self) -> None:
        super().close()
        self.gpus.close()
        del GPUS[self.one], GPUS[self.two]
