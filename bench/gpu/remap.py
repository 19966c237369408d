"""CUDA's virtual memory management: time to map and unmap, and one copy for several processes.

    python -m bench.gpu.remap [--device cuda:0] [--bytes 16GB] [--unit 128MiB] [--rounds N]
        [--engines N] [--json PATH]

- units, pages: `--bytes` in allocations of `--unit`, and of the device's granularity (2 MiB),
  mapped as one range and unmapped, as engines do it; medians
- engines: processes that import and map the same allocations read-only. Each reads the start of
  every allocation. `added_part` is the memory that they take of the device beyond their contexts,
  divided by the bytes that each of them maps

Exit status 2: there is no such device, or it has no allocations that can be exported.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.gpu.mapping import MARK_BYTES, MappingProcess, command_of, digest_of, mark_of
from bench.gpu.runner import NOTHING_MEASURED
from bench.report import median, write
from shared.errors import DeviceFailed, DeviceMissing
from thaw.units import parse_size
from weights.devices.cuda_runtime import load_cuda
from weights.devices.cuda_virtual_memory import load_virtual_memory
from weights.devices.driver import CudaDriver
from weights.devices.mapped_range import MappedRange
from weights.devices.virtual_memory import Allocation, VirtualMemory


def time_ms(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


@contextlib.contextmanager
def allocated(memory: VirtualMemory, device: int, count: int, unit_bytes: int) -> Iterator[list[Allocation]]:
    """Create allocations; release them at the end."""
    found: list[Allocation] = []
    try:
        for _ in range(count):
            found.append(memory.create(device, unit_bytes))  # noqa: PERF401  # those before a failure are released
        yield found
    finally:
        for allocation in found:
            memory.release(allocation)


def map_all(
    memory: VirtualMemory, device: int, allocations: Sequence[Allocation], unit_bytes: int, *, writable: bool
) -> MappedRange:
    """Map the allocations as one range."""
    mapped = MappedRange(memory, device, len(allocations) * unit_bytes)
    try:
        for place, allocation in enumerate(allocations):
            mapped.map(place * unit_bytes, unit_bytes, allocation, writable=writable)
    except BaseException:
        mapped.close()
        raise
    return mapped


def measure_mapping(memory: VirtualMemory, device: int, count: int, unit_bytes: int, rounds: int) -> dict[str, float]:
    """Return median milliseconds to create, map and unmap `count` allocations."""
    mapping, unmapping = [], []
    began = time.perf_counter()
    with allocated(memory, device, count, unit_bytes) as allocations:
        created_ms = (time.perf_counter() - began) * 1e3
        for _ in range(rounds):
            began = time.perf_counter()
            mapped = map_all(memory, device, allocations, unit_bytes, writable=False)
            mapping.append((time.perf_counter() - began) * 1e3)
            unmapping.append(time_ms(mapped.close))
    return {"create": created_ms, "map": median(mapping), "unmap": median(unmapping)}


def write_marks(cuda: CudaDriver, mapped: MappedRange, unit_bytes: int) -> None:
    """Write the mark of each unit at its start."""
    stream = cuda.stream(urgent=True)
    try:
        for unit, at in enumerate(range(0, mapped.nbytes, unit_bytes)):
            host = ctypes.create_string_buffer(mark_of(unit), MARK_BYTES)
            cuda.copy(mapped.address + at, ctypes.addressof(host), MARK_BYTES, stream)
            cuda.wait(cuda.record(stream))
    finally:
        cuda.destroy_stream(stream)


@contextlib.contextmanager
def marked_units(cuda: CudaDriver, memory: VirtualMemory, device: int, count: int, unit_bytes: int) -> Iterator[list[int]]:
    """Create allocations with marks; yield their descriptors."""
    with allocated(memory, device, count, unit_bytes) as allocations, contextlib.ExitStack() as stack:
        mapped = map_all(memory, device, allocations, unit_bytes, writable=True)
        stack.callback(mapped.close)
        write_marks(cuda, mapped, unit_bytes)
        descriptors = []
        for allocation in allocations:
            descriptors.append(memory.export_descriptor(allocation))
            stack.callback(os.close, descriptors[-1])
        yield descriptors


def measure_sharing(
    cuda: CudaDriver,
    memory: VirtualMemory,
    device: int,
    count: int,
    unit_bytes: int,
    engines: int,
    command: Callable[[int], Sequence[str]],
) -> dict[str, float]:
    """Return how long processes take to map the same allocations, and the memory that they add.

    Raises:
        DeviceFailed: A process does not read the bytes that were written here.
    """
    with marked_units(cuda, memory, device, count, unit_bytes) as descriptors, contextlib.ExitStack() as stack:
        processes = []
        for _ in range(engines):
            processes.append(MappingProcess(command))
            stack.callback(processes[-1].close)
        free = cuda.free_bytes()
        took = [process.map(descriptors, unit_bytes) for process in processes]
        added = free - cuda.free_bytes()
        if any(process.read() != digest_of(count) for process in processes):
            raise DeviceFailed("a process reads other bytes than were written to the device")
    return {"import_ms": median(took), "added_part": added / (count * unit_bytes), "engines": float(engines)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.remap", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--bytes", type=parse_size, default=16 * 10**9)
    parser.add_argument("--unit", type=parse_size, default=128 * 1024 * 1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = int(options.device.removeprefix("cuda:"))
    try:
        cuda, memory = load_cuda(), load_virtual_memory()
        cuda.use(device)
    except DeviceMissing as e:
        print(f"nothing measured: {e.message}")
        return NOTHING_MEASURED
    if not memory.is_supported(device):
        print(f"nothing measured: {options.device} has no allocations that can be exported by file descriptor")
        return NOTHING_MEASURED
    figures: dict[str, float] = {}
    page = memory.granularity(device)
    unit = max(page, options.unit // page * page)
    for name, size in (("units", unit), ("pages", page)):
        found = measure_mapping(memory, device, max(1, options.bytes // size), size, options.rounds)
        figures |= {f"{what}_{name}_ms": value for what, value in found.items()}
        write(options.json, figures)
    figures |= measure_sharing(cuda, memory, device, max(1, options.bytes // unit), unit, options.engines, command_of(device))
    figures |= {"bytes": float(options.bytes), "unit_bytes": float(unit), "page_bytes": float(page)}
    for name, value in figures.items():
        print(f"{name} {value:.4g}")
    write(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
