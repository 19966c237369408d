"""An engine's process that borrows pages for its KV cache over the loader's socket."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from tests.unit.loader.store.separate_devices import COUNT

WITHIN_S = 60.0
KIND = "stand-in"
"""`real`: the engines use a GPU (tests/gpu)."""
ENGINE = """
import sys
from pathlib import Path
from weights.kv_lease import KvLease, Lent, Shrink

device, held, memory = sys.argv[3], 0, None
if device.startswith("cuda"):
    from services.engine.model.gpu_kv import GpuKvMemory, TorchGpu
    from tests.support import mapped_gpu_units
    if sys.argv[4] == "stand-in":
        mapped_gpu_units.install()
    memory = GpuKvMemory(TorchGpu(sys.argv[5]), 16384, 1024)

def deliver(event):
    global held
    if isinstance(event, Lent):
        held += event.more
        print("lent", held, flush=True)
    else:
        print("shrink", event.keep, flush=True)

floor, ceiling = int(sys.argv[2]), int(sys.argv[6])
lease = KvLease(Path(sys.argv[1]), device, "i-1", floor, deliver, ceiling_pages=ceiling, memory=memory)
for line in sys.stdin:
    word, number = line.split()
    if word == "demand":
        lease.demand(int(number))
    else:
        held -= int(number)
        if memory is not None:
            memory.remove(int(number))
            assert memory.allocated_pages == held
        lease.give_back(int(number))
lease.close()
"""


class Engine:
    """An engine's process that borrows."""

    def __init__(self, path: Path, floor: int, device: str, bus_id: str | None) -> None:
        """Start an engine that borrows pages.

        Args:
            bus_id: PCI bus id of a GPU; None: the device is no GPU.
        """
        arguments = [str(path), str(floor), device, KIND, bus_id or "", str(COUNT)]
        command = [sys.executable, "-c", ENGINE, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def reads(self, *expected: str) -> None:
        """Read lines until one of `expected`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            while (line := (await asyncio.to_thread(self.process.stdout.readline)).strip()) not in expected:
                assert line, "the engine has ended"

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class NoLoads:
    """A loader without loads: its socket only lends."""

    def release_hold(self, holder: str) -> None: ...
