"""Units of weights on a GPU, which the loader owns and this process maps (ADR 0060)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from services.engine.model.device_segment import current_gpu, see_as_bytes
from shared.contracts.loader_socket import SocketComplete, SocketDescriptors, SocketMap
from shared.contracts.segment import GpuUnitsHandle, PagesLayout
from shared.errors import EngineFailed
from weights.client import LoaderConnection
from weights.devices.cuda_virtual_memory import load_virtual_memory
from weights.devices.mapped_range import MappedRange
from weights.devices.virtual_memory import VirtualMemory

_WITHIN_S = 60.0


@contextmanager
def gpu_memory(bus_id: str) -> Iterator[tuple[VirtualMemory, torch.device]]:
    """Use the GPU with this PCI bus id in this thread."""
    with current_gpu(bus_id) as device:
        yield load_virtual_memory(), device


def open_units(handle: GpuUnitsHandle, path: Path, instance_id: str, weights_id: str) -> torch.Tensor:
    """Map the units of `handle` as one range of bytes on the GPU, read-only.

    The mappings are removed with the last tensor that refers to the memory.

    Args:
        handle: The loader's answer.
        path: The loader's socket.
        instance_id: The holder of the weights.
        weights_id: The weights that it holds.

    Raises:
        ThawError: The loader's refusal, or the driver's.
        EngineFailed: The loader has not sent all units.
        Unreachable: No loader listens, or it went away.
    """
    with gpu_memory(handle.bus_id) as (memory, device):
        units = MappedRange(memory, device.index or 0, handle.nbytes)
        try:
            _map_units(units, _places(handle), path, SocketMap(instance_id=instance_id, weights_id=weights_id))
            seen, owner = see_as_bytes(units.address, units.nbytes, device)
        except BaseException:
            units.close()
            raise
        # At process exit the driver unmaps, because it may be unloaded already.
        weakref.finalize(owner, units.close).atexit = False
        return seen


class ArrivingUnits:
    """A GPU's units, mapped one after the other at fixed addresses while they arrive.

    Work that reads an address before its unit is mapped fails, and the GPU's context with it: the
    engine never computes with wrong bytes.
    """

    def __init__(self, layout: PagesLayout, path: Path, instance_id: str, weights_id: str) -> None:
        """Reserve the addresses.

        Args:
            layout: Of a GPU.
            path: The loader's socket.
            instance_id: The holder of the weights.
            weights_id: The weights that it holds.

        Raises:
            ThawError: The driver's error.
        """
        assert layout.bus_id is not None
        self.layout, self._bus_id = layout, layout.bus_id
        self._path, self._ask = path, SocketMap(instance_id=instance_id, weights_id=weights_id)
        self._places = _places(layout)
        self._left = set(self._places)
        with gpu_memory(self._bus_id) as (memory, device):
            self._range = MappedRange(memory, device.index or 0, layout.nbytes)
            try:
                with _placeholder(memory, device.index or 0, self._range):
                    self.memory, owner = see_as_bytes(self._range.address, layout.nbytes, device)
            except BaseException:
                self._range.close()
                raise
        weakref.finalize(owner, self._range.close).atexit = False

    def map(self, units: Sequence[int], descriptors: Sequence[int]) -> list[tuple[int, int]]:
        """Map units, close their descriptors, and return their bytes in the segment.

        Raises:
            EngineFailed: The loader has sent a unit twice, or one that there is not.
            DeviceFailed: The driver failed.
        """
        with closing_all(descriptors), gpu_memory(self._bus_id):
            for unit, descriptor in zip(units, descriptors, strict=True):
                if unit not in self._left:
                    raise EngineFailed(f"The loader has sent unit {unit}, which was not expected")
                self._range.map_descriptor(*self._places[unit], descriptor)
                self._left.discard(unit)
        found = [self.layout.units[unit] for unit in units]
        return [(u.offset, u.offset + u.nbytes) for u in found]

    def map_all(self, handle: GpuUnitsHandle) -> None:
        """Map the units that have not arrived yet; the loader has all of them now.

        Raises:
            EngineFailed: They are not those that the model is bound to.
        """
        if (handle.nbytes, handle.units) != (self.layout.nbytes, self.layout.units):
            raise EngineFailed(f"The units on {handle.device} have changed during the load. Start the instance again")
        if not self._left:
            return
        with gpu_memory(self._bus_id):
            _map_units(self._range, {i: self._places[i] for i in self._left}, self._path, self._ask)
        self._left.clear()


@contextmanager
def _placeholder(memory: VirtualMemory, device: int, units: MappedRange) -> Iterator[None]:
    """Map memory at the first addresses: torch asks the driver whose they are."""
    nbytes = memory.granularity(device)
    allocation = memory.create(device, nbytes)
    try:
        units.map(0, nbytes, allocation, writable=False)
        try:
            yield
        finally:
            units.unmap(0)
    finally:
        memory.release(allocation)


@contextmanager
def closing_all(descriptors: Iterable[int]) -> Iterator[None]:
    """Close descriptors at the end."""
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _places(layout: GpuUnitsHandle | PagesLayout) -> dict[int, tuple[int, int]]:
    """Return where each unit begins in the range, and the bytes of its memory."""
    ends = [*(u.start for u in layout.units[1:]), layout.nbytes]
    return {i: (u.start, end - u.start) for i, (u, end) in enumerate(zip(layout.units, ends, strict=True))}


def _map_units(units: MappedRange, places: Mapping[int, tuple[int, int]], path: Path, ask: SocketMap) -> None:
    """Ask the loader for all units, and map those that have a place here.

    Raises:
        EngineFailed: The loader has not sent one of them.
    """
    missing = set(places)
    with closing(LoaderConnection(path, _WITHIN_S)) as connected:
        connected.send(ask.model_dump_json().encode() + b"\n")
        while not isinstance(found := connected.receive(), SocketComplete):
            if not isinstance(found, SocketDescriptors):
                raise EngineFailed(f"The loader answered {found.kind!r} to a map request")
            descriptors = connected.take_descriptors(len(found.units))
            with closing_all(descriptors):
                for unit, descriptor in zip(found.units, descriptors, strict=True):
                    if unit in missing:
                        units.map_descriptor(*places[unit], descriptor)
                        missing.discard(unit)
    if missing:
        raise EngineFailed(f"The loader has not sent {len(missing)} units. Start the instance again")
