"""CUDA's virtual memory management on a real GPU: `python -m pytest tests/gpu`.

ADR 0060 rests on these rules; the stand-in keeps them in tests/unit/loader/devices.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys

import pytest

from shared.errors import DeviceFailed, DeviceMissing
from weights.devices.cuda_runtime import CudaRuntime, load_cuda
from weights.devices.cuda_virtual_memory import CudaVirtualMemory, load_virtual_memory

pytestmark = pytest.mark.gpu
READER = """
import ctypes, os, socket, sys
from weights.devices.cuda_runtime import load_cuda
from weights.devices.cuda_virtual_memory import load_virtual_memory
cuda, memory, peer = load_cuda(), load_virtual_memory(), socket.socket(fileno=int(sys.argv[1]))
cuda.use(0)
size = memory.granularity(0)
_, (descriptor,), _, _ = socket.recv_fds(peer, 1, 1)
imported, start = memory.import_descriptor(descriptor), memory.reserve(size)
os.close(descriptor)
memory.map(start, size, imported)
memory.set_access(start, size, 0, writable=False)
memory.release(imported)
peer.sendall(b"m")
peer.recv(1)
host = ctypes.create_string_buffer(7)
cuda.copy_back(ctypes.addressof(host), start, 7)
peer.sendall(host.raw)
"""


@pytest.fixture
def cuda() -> CudaRuntime:
    try:
        cuda = load_cuda()
    except DeviceMissing as e:
        pytest.skip(e.message)
    cuda.use(0)
    return cuda


@pytest.fixture
def memory(cuda: CudaRuntime) -> CudaVirtualMemory:
    memory = load_virtual_memory()
    if not memory.is_supported(0):
        pytest.skip("cuda:0 has no allocations that can be exported by file descriptor")
    return memory


def write(cuda: CudaRuntime, address: int, content: bytes) -> None:
    host, stream = ctypes.create_string_buffer(content, len(content)), cuda.stream(urgent=True)
    cuda.copy(address, ctypes.addressof(host), len(content), stream)
    cuda.wait(cuda.record(stream))
    cuda.destroy_stream(stream)


def read(cuda: CudaRuntime, address: int, nbytes: int) -> bytes:
    host = ctypes.create_string_buffer(nbytes)
    cuda.copy_back(ctypes.addressof(host), address, nbytes)
    return host.raw


def test_allocations_in_any_order_are_one_range(cuda: CudaRuntime, memory: CudaVirtualMemory) -> None:
    size = memory.granularity(0)
    units, start = [memory.create(0, size) for _ in range(2)], memory.reserve(2 * size)
    for place, unit in enumerate(reversed(units)):
        memory.map(start + place * size, size, unit)
        memory.release(unit)
    memory.set_access(start, 2 * size, 0, writable=True)
    write(cuda, start + size - 3, b"weights")
    assert read(cuda, start + size - 3, 7) == b"weights"
    with pytest.raises(DeviceFailed):
        memory.free_reservation(start, 2 * size)
    for place in range(2):
        memory.unmap(start + place * size, size)
    memory.free_reservation(start, 2 * size)


def test_addresses_are_mapped_once(memory: CudaVirtualMemory) -> None:
    size = memory.granularity(0)
    units, start = [memory.create(0, size) for _ in range(2)], memory.reserve(size)
    memory.map(start, size, units[0])
    with pytest.raises(DeviceFailed, match="cuMemMap"):
        memory.map(start, size, units[1])
    memory.unmap(start, size)
    memory.free_reservation(start, size)
    for unit in units:
        memory.release(unit)


def test_another_process_keeps_a_unit_that_was_released_here(cuda: CudaRuntime, memory: CudaVirtualMemory) -> None:
    size = memory.granularity(0)
    unit, start = memory.create(0, size), memory.reserve(size)
    memory.map(start, size, unit)
    memory.set_access(start, size, 0, writable=True)
    write(cuda, start, b"weights")
    mine, theirs = socket.socketpair()
    mine.settimeout(120)
    with mine, subprocess.Popen([sys.executable, "-c", READER, str(theirs.fileno())], pass_fds=[theirs.fileno()]) as reader:
        theirs.close()
        descriptor = memory.export_descriptor(unit)
        socket.send_fds(mine, [b"u"], [descriptor])
        os.close(descriptor)
        assert mine.recv(1) == b"m"
        memory.unmap(start, size)
        memory.free_reservation(start, size)
        memory.release(unit)
        mine.sendall(b"r")
        assert mine.recv(7) == b"weights"
        assert reader.wait(120) == 0
