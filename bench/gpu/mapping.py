"""A process that maps GPU memory of another one, as engines map the loader's units.

`python -m bench.gpu.mapping FD DEVICE` serves the socket with this descriptor until it is closed.
The socket is of the kind SOCK_SEQPACKET: one JSON object a message, some with descriptors.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from shared.errors import DeviceFailed
from weights.devices.cuda_runtime import load_cuda
from weights.devices.cuda_virtual_memory import load_virtual_memory
from weights.devices.driver import CudaDriver
from weights.devices.mapped_range import MappedRange
from weights.devices.virtual_memory import VirtualMemory

MARK_BYTES = 8
"""Bytes at the start of each unit that are compared."""
WITHIN_S = 60.0
_BATCH, _MESSAGE_BYTES = 128, 4096


def mark_of(unit: int) -> bytes:
    """Return the first bytes of a unit."""
    return (unit + 1).to_bytes(MARK_BYTES, "little")


def digest_of(units: int) -> str:
    """Return what `MappingProcess.read` returns if each unit has its mark."""
    return hashlib.sha256(b"".join(mark_of(unit) for unit in range(units))).hexdigest()


class MappingProcess:
    """The other side's process.

    Attributes:
        pid: Of the process.
    """

    def __init__(self, command: Callable[[int], Sequence[str]]) -> None:
        """Start it, and wait until it has a context.

        Args:
            command: Returns the command for the descriptor of the process's socket.

        Raises:
            DeviceFailed: It ended.
        """
        self._peer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._peer.settimeout(WITHIN_S)
        with theirs:
            self._process = subprocess.Popen(command(theirs.fileno()), pass_fds=[theirs.fileno()])
        self.pid = self._process.pid
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def map(self, descriptors: Sequence[int], unit_bytes: int) -> float:
        """Map allocations at consecutive addresses; return the milliseconds that it took.

        Args:
            descriptors: Of allocations of `unit_bytes` each. The caller closes them.
        """
        took = 0.0
        for first in range(0, len(descriptors), _BATCH):
            order = {"do": "map", "first": first, "units": len(descriptors), "unit_bytes": unit_bytes}
            socket.send_fds(self._peer, [json.dumps(order).encode()], list(descriptors[first : first + _BATCH]))
            took += float(self._answer()["ms"])
        return took

    def read(self) -> str:
        """Return a digest of the marks that the process reads from the device."""
        self._peer.send(json.dumps({"do": "read"}).encode())
        return str(self._answer()["digest"])

    def unmap(self) -> float:
        """Unmap everything; return the milliseconds that it took."""
        self._peer.send(json.dumps({"do": "unmap"}).encode())
        return float(self._answer()["ms"])

    def close(self) -> None:
        """End the process."""
        self._peer.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # the driver may hang in it
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        message = self._peer.recv(_MESSAGE_BYTES)
        if not message:
            raise DeviceFailed("a process that maps memory has ended; its error is above")
        found: dict[str, Any] = json.loads(message)
        return found


def command_of(device: int) -> Callable[[int], Sequence[str]]:
    """Return the command of a process that uses CUDA's device `device`."""
    return lambda fd: [sys.executable, "-m", "bench.gpu.mapping", str(fd), str(device)]


def serve(peer: socket.socket, cuda: CudaDriver, memory: VirtualMemory, device: int) -> None:
    """Do what the other side asks, until it closes the socket."""
    cuda.use(device)
    cuda.free_bytes()
    _send(peer, {"is_ready": True})
    mapped, unit_bytes = None, 0
    while True:
        message, descriptors, _, _ = socket.recv_fds(peer, _MESSAGE_BYTES, _BATCH)
        if not message:
            break
        order, began = json.loads(message), time.perf_counter()
        if order["do"] == "map":
            unit_bytes = order["unit_bytes"]
            if mapped is None:
                mapped = MappedRange(memory, device, order["units"] * unit_bytes)
            for unit, descriptor in enumerate(descriptors, order["first"]):
                mapped.map_descriptor(unit * unit_bytes, unit_bytes, descriptor)
                os.close(descriptor)
        elif order["do"] == "read" and mapped is not None:
            _send(peer, {"digest": _digest(cuda, mapped, unit_bytes)})
            continue
        elif mapped is not None:
            mapped.close()
            mapped = None
        _send(peer, {"ms": (time.perf_counter() - began) * 1e3})
    if mapped is not None:
        mapped.close()


def _digest(cuda: CudaDriver, mapped: MappedRange, unit_bytes: int) -> str:
    host, found = ctypes.create_string_buffer(MARK_BYTES), hashlib.sha256()
    for at in range(0, mapped.nbytes, unit_bytes):
        cuda.copy_back(ctypes.addressof(host), mapped.address + at, MARK_BYTES)
        found.update(host.raw)
    return found.hexdigest()


def _send(peer: socket.socket, answer: dict[str, Any]) -> None:
    peer.send(json.dumps(answer).encode())


def main() -> None:
    fd, device = map(int, sys.argv[1:])
    with socket.socket(fileno=fd) as peer:
        serve(peer, load_cuda(), load_virtual_memory(), device)


if __name__ == "__main__":
    main()
