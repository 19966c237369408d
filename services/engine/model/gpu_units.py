"""Units of weights on a GPU, which the loader owns and this process maps (ADR 0060)."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from services.engine.model.device_segment import current_gpu, see_as_bytes
from shared.contracts.loader_socket import SOCKET_REPLY, SocketComplete, SocketDescriptors, SocketError, SocketMap
from shared.contracts.segment import GpuUnitsHandle
from shared.errors import EngineFailed, Unreachable, from_body
from shared.unix_sockets import short_address
from weights.devices.cuda_virtual_memory import load_virtual_memory
from weights.devices.mapped_range import MappedRange
from weights.devices.virtual_memory import VirtualMemory

_WITHIN_S = 60.0
_MOST_DESCRIPTORS = 253
"""The kernel's limit for one message (SCM_MAX_FD)."""
_RECEIVED_BYTES = 64 * 1024


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
        weights_id: What it holds.

    Raises:
        ThawError: The loader's refusal, or the driver's.
        EngineFailed: The loader has not sent all units.
        Unreachable: No loader listens, or it went away.
    """
    with gpu_memory(handle.bus_id) as (memory, device):
        units = MappedRange(memory, device.index or 0, handle.nbytes)
        try:
            _map_all(units, handle, path, SocketMap(instance_id=instance_id, weights_id=weights_id))
            seen, owner = see_as_bytes(units.address, units.nbytes, device)
        except BaseException:
            units.close()
            raise
        # At process exit the driver unmaps, because it may be unloaded already.
        weakref.finalize(owner, units.close).atexit = False
        return seen


def _map_all(units: MappedRange, handle: GpuUnitsHandle, path: Path, ask: SocketMap) -> None:
    ends = [*(u.start for u in handle.units[1:]), handle.nbytes]
    places = {i: (u.start, end - u.start) for i, (u, end) in enumerate(zip(handle.units, ends, strict=True))}
    with closing(_connect(path)) as connected:
        connected.sendall(ask.model_dump_json().encode() + b"\n")
        for unit, descriptor in _receive_units(connected, path):
            try:
                if unit not in places:
                    raise EngineFailed(f"The loader has sent unit {unit}, which was not expected")
                units.map_descriptor(*places.pop(unit), descriptor)
            finally:
                os.close(descriptor)
    if places:
        raise EngineFailed(f"The loader has not sent {len(places)} units of {handle.device}. Start the instance again")


def _connect(path: Path) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(_WITHIN_S)
    try:
        with short_address(path) as address:
            connected.connect(address)
    except OSError as e:
        connected.close()
        raise Unreachable(f"No loader listens at {path}: {e}; start this node's loader") from e
    return connected


def _receive_units(connected: socket.socket, path: Path) -> Iterator[tuple[int, int]]:
    """Yield units and their descriptors, which the caller closes, until the loader has sent all."""
    received, descriptors = b"", list[int]()
    try:
        while True:
            line, newline, rest = received.partition(b"\n")
            if not newline:
                received += _receive(connected, path, descriptors)
                continue
            received = rest
            match SOCKET_REPLY.validate_json(line):
                case SocketDescriptors(units=units):
                    if len(units) > len(descriptors):
                        raise EngineFailed(f"The loader has sent {len(descriptors)} descriptors for {len(units)} units")
                    for unit in units:
                        yield unit, descriptors.pop(0)
                case SocketComplete():
                    return
                case SocketError(error=error):
                    raise from_body(error)
                case other:
                    raise EngineFailed(f"The loader answered {other.kind!r} to a map request")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _receive(connected: socket.socket, path: Path, descriptors: list[int]) -> bytes:
    """Receive bytes, and append the descriptors sent with them."""
    try:
        data, found, flags, _ = socket.recv_fds(connected, _RECEIVED_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except OSError as e:
        raise Unreachable(f"The loader at {path} went away, or was silent for {_WITHIN_S:.0f} s: {e}") from e
    descriptors += found
    if flags & socket.MSG_CTRUNC:
        raise EngineFailed("This process cannot take so many descriptors: raise its limit (ulimit -n)")
    if not data:
        raise Unreachable(f"The loader at {path} closed the connection; start the instance again")
    return data
