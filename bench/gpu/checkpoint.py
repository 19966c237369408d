"""CUDA checkpoint: processes of several sizes, and processes that map another one's memory.

    python -m bench.gpu.checkpoint [--device cuda:0] [--sizes 1GB,4GB,16GB] [--json PATH]

- sizes: torch processes are suspended and resumed as the nodeagent does it. `freed_part` is the
  least part of the bytes that NVML reports as free; the speeds are those of the largest size,
  beside copies from page-locked memory. Each process computes the same before and after
- mapped: whether a process that maps memory of another one can be checkpointed and restored
  (`with_mapped_memory`: 1 or 0), and whether it can be after it has unmapped that memory, and then
  map it again (`after_detaching`)

Figures of the sizes are written before the second part, in which a driver may hang. Exit status 2:
there is no such device, or its driver has no checkpoint calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from bench.gpu.mapping import MappingProcess, command_of, digest_of
from bench.gpu.remap import marked_units
from bench.gpu.runner import NOTHING_MEASURED
from bench.hot_swap import pinned_copies
from bench.report import write
from services.nodeagent.devices.cuda import CudaDevice, load_nvml
from services.nodeagent.suspend.cgroups import Cgroups, open_cgroups
from services.nodeagent.suspend.cuda import CheckpointDriver, CudaCheckpoint, State, open_driver
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import Target
from shared.errors import DeviceFailed, DeviceMissing, EngineFailed
from thaw.units import parse_size
from weights.devices.cuda_runtime import load_cuda
from weights.devices.cuda_virtual_memory import load_virtual_memory

INSTANCE = "bench"
UNIT_BYTES, UNITS = 64 << 20, 16
_LOCK_MS = 10_000
_CHILD = """
import sys, torch
torch.manual_seed(0)
held = torch.randint(0, 255, (int(sys.argv[1]),), dtype=torch.uint8, device=sys.argv[2])
print("ready", flush=True)
for line in sys.stdin:
    print(sum(int(part.sum(dtype=torch.int64)) for part in held.split(1 << 28)), flush=True)
"""


class Process(Protocol):
    """A process with memory on the device."""

    pid: int

    def ask(self) -> str:
        """Return something that it computes from all of this memory."""
        ...


class TorchProcess:
    """A torch process that holds `nbytes` on the device."""

    def __init__(self, nbytes: int, device: str) -> None:
        command = [sys.executable, "-c", _CHILD, str(nbytes), device]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._child.pid
        try:
            self._line()
        except BaseException:
            self.close()
            raise

    def ask(self) -> str:
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline().strip()
        if not line:
            raise DeviceFailed("a torch process has ended; its error is above")
        return line

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


@contextlib.contextmanager
def torch_process(nbytes: int, device: str) -> Iterator[Process]:
    """Start a torch process; end it afterwards."""
    with contextlib.closing(TorchProcess(nbytes, device)) as process:
        yield process


Start = Callable[[int], contextlib.AbstractContextManager[Process]]


async def measure_sizes(
    way: CudaCheckpoint, groups: Cgroups, used_bytes: Callable[[], int], device: str, sizes: Sequence[int], start: Start
) -> dict[str, float]:
    """Suspend and resume processes of these sizes, in bytes.

    Raises:
        DeviceFailed: A process computes something else afterwards.
        CannotSuspend: The driver failed.
        RestoreFailed: The same.
    """
    figures, freed_parts = dict[str, float](), list[float]()
    for size in sorted(sizes):
        with start(size) as process:
            target = Target(INSTANCE, "vllm", (device,), groups.gather(INSTANCE, process.pid, include_host=True))
            try:
                before, used, began = process.ask(), used_bytes(), time.perf_counter()
                taken = await way.suspend(target)
                suspended_s = time.perf_counter() - began
                freed_parts.append((used - used_bytes()) / size)
                began = time.perf_counter()
                await way.resume(target)
                restored_s = time.perf_counter() - began
                if process.ask() != before:
                    raise DeviceFailed(f"a process with {size} bytes computes something else after it was restored")
            finally:
                groups.thaw(INSTANCE)
        name = f"{size / 1e9:g}_gb"
        figures |= {f"suspend_{name}_ms": suspended_s * 1e3, f"restore_{name}_ms": restored_s * 1e3}
        figures |= {
            "suspend_gb_per_s": taken.freed_bytes / suspended_s / 1e9,
            "restore_gb_per_s": taken.freed_bytes / restored_s / 1e9,
        }
    return figures | {"freed_part": min(freed_parts)}


def checkpoint_and_restore(driver: CheckpointDriver, pid: int) -> str:
    """Checkpoint and restore a process; return the driver's error, or an empty text."""
    try:
        driver.lock(pid, _LOCK_MS)
        driver.checkpoint(pid)
        driver.restore(pid)
        driver.unlock(pid)
    except EngineFailed as e:
        with contextlib.suppress(EngineFailed):
            if driver.state(pid) is State.CHECKPOINTED:
                driver.restore(pid)
            if driver.state(pid) is State.LOCKED:
                driver.unlock(pid)
        return e.message
    return ""


def measure_mapped(
    driver: CheckpointDriver, descriptors: Sequence[int], unit_bytes: int, start: Callable[[], MappingProcess]
) -> dict[str, float]:
    """Checkpoint a process that maps memory of this one, and another that has unmapped it."""
    expected, found = digest_of(len(descriptors)), dict[str, float]()
    for name, detaches in (("with_mapped_memory", False), ("after_detaching", True)):
        with contextlib.closing(start()) as process:
            process.map(descriptors, unit_bytes)
            if process.read() != expected:
                raise DeviceFailed("a process reads other bytes than were written to the device")
            if detaches:
                process.unmap()
            why = checkpoint_and_restore(driver, process.pid)
            if not why:
                try:
                    if detaches:
                        process.map(descriptors, unit_bytes)
                    why = "" if process.read() == expected else "it reads other bytes after it was restored"
                except (OSError, DeviceFailed) as e:
                    why = f"it cannot read after it was restored: {e}"
            print(f"{name}: {why or 'checkpointed and restored'}", flush=True)
            found[name] = 0.0 if why else 1.0
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.checkpoint", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--sizes", type=lambda text: [parse_size(part) for part in text.split(",")], default=[10**9, 4 * 10**9, 16 * 10**9]
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    index, nvml = int(options.device.removeprefix("cuda:")), load_nvml()
    driver, reason = open_driver(nvml)
    try:
        if driver is None or nvml is None:
            raise DeviceMissing(reason)
        pinned = pinned_copies(index)
    except DeviceMissing as e:
        print(f"nothing measured: {e.message}")
        return NOTHING_MEASURED
    gpu, groups = CudaDevice(nvml, index, 0.9, None), open_cgroups(f"gpu-bench-{os.getpid()}")
    way = CudaCheckpoint(driver, "", groups, MemoryUsage({options.device: gpu}))
    try:
        sizes = measure_sizes(
            way,
            groups,
            lambda: gpu.used_bytes(0, 0),
            options.device,
            options.sizes,
            lambda size: torch_process(size, options.device),
        )
        figures = asyncio.run(sizes)
    finally:
        groups.kill(INSTANCE)
        groups.remove(INSTANCE)
    figures |= {"pinned_gb_per_s": pinned, "restore_ratio": figures["restore_gb_per_s"] / pinned}
    for name, value in figures.items():
        print(f"{name} {value:.4g}", flush=True)
    write(options.json, figures)
    cuda, memory = load_cuda(), load_virtual_memory()
    cuda.use(index)
    if memory.is_supported(index):
        with marked_units(cuda, memory, index, UNITS, UNIT_BYTES) as descriptors:
            figures |= measure_mapped(driver, descriptors, UNIT_BYTES, lambda: MappingProcess(command_of(index)))
        write(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
