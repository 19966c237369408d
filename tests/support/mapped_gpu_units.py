"""An engine's mapping of units on a GPU, or on one whose memory is host memory.

Run `python -m tests.support.mapped_gpu_units SOCKET INSTANCE WEIGHTS` with a handle on the standard
input: it prints the SHA-256 of each unit, and ends at the next line. With `real` as a fourth
argument the memory is the GPU's.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from services.engine.model import gpu_kv, gpu_units
from shared.contracts.segment import GpuUnitsHandle
from tests.support.fake_virtual_memory import GRANULARITY, FakeVirtualMemory

_memory = FakeVirtualMemory(2048 * GRANULARITY)


@contextmanager
def gpu_memory(_: str) -> Iterator[tuple[FakeVirtualMemory, torch.device]]:
    yield _memory, torch.device("cpu")


def see_as_bytes(address: int, nbytes: int, _: torch.device) -> tuple[torch.Tensor, object]:
    owner = (ctypes.c_ubyte * nbytes).from_address(address)
    return torch.frombuffer(owner, dtype=torch.uint8), owner


def install() -> None:
    """Let this process map units of the stand-in."""
    setattr(gpu_units, "gpu_memory", gpu_memory)  # noqa: B010  # of this process alone; mypy refuses an assignment
    for module in (gpu_units, gpu_kv):
        setattr(module, "see_as_bytes", see_as_bytes)  # noqa: B010


def main(path: str, instance_id: str, weights_id: str, kind: str = "stand-in") -> None:
    if kind == "stand-in":
        install()
    handle = GpuUnitsHandle.model_validate_json(sys.stdin.readline())
    memory = gpu_units.open_units(handle, Path(path), instance_id, weights_id)
    units = [memory[u.start : u.start + u.nbytes].cpu().numpy().tobytes() for u in handle.units]
    sys.stdout.write(" ".join(hashlib.sha256(unit).hexdigest() for unit in units) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
