"""CUDA checkpoint and restore of real processes on a GPU.

Run `python -m pytest tests/gpu/test_suspend.py -s`.

Torch processes are locked, checkpointed and frozen, and NVML shows that their bytes are released.
After thaw, restore and unlock they compute the same.

Prints bytes and milliseconds for several sizes, so that latency can be plotted against bytes, and
the result of the order in SwapServeLLM's paper.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from services.nodeagent.devices.cuda import CudaDevice, load_nvml
from services.nodeagent.suspend.cgroups import Cgroups, open_cgroups
from services.nodeagent.suspend.cuda import CudaCheckpoint, State, open_driver
from services.nodeagent.suspend.gpu_pairs import gpus_of, others_of_kind
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import Target

pytestmark = pytest.mark.gpu
MIB = 1 << 20
CHILD = """
import sys, torch
torch.manual_seed(0)
size = int(sys.argv[1])
held = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
weights = torch.randn(256, 256, device="cuda")
print("ready", flush=True)
for line in sys.stdin:
    state = torch.ones(256, device="cuda")
    tokens = []
    for _ in range(8):
        state = torch.tanh(weights @ state)
        tokens.append(int(state.argmax()))
    print(int(held.to(torch.int64).sum()), *tokens, flush=True)
"""


@dataclass
class Process:
    """A torch process that holds device memory.

    It answers with a digest of that memory and some greedy steps.
    """

    child: subprocess.Popen[str]

    def ask(self) -> str:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        return self.child.stdout.readline().strip()


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    nvml = load_nvml()
    if nvml is None or nvml.nvmlDeviceGetCount() == 0:
        pytest.skip("no NVIDIA driver, or no device that NVML can see")
    return CudaDevice(nvml, 0, 0.9, None)


@pytest.fixture
def groups() -> Iterator[Cgroups]:
    found = open_cgroups(f"gpu{os.getpid()}")
    yield found
    found.kill("i")
    found.remove("i")


@pytest.fixture
def way(device: CudaDevice, groups: Cgroups) -> CudaCheckpoint:
    driver, reason = open_driver(load_nvml())
    if driver is None:
        pytest.skip(reason)
    return CudaCheckpoint(driver, reason, groups, MemoryUsage({"cuda:0": device}))


def spawn(mib: int) -> Process:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(mib * MIB)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    if child.stdout.readline().strip() != "ready":
        child.wait()
        pytest.skip("torch here has no CUDA")
    return Process(child)


@contextlib.contextmanager
def computing(groups: Cgroups, mib: int) -> Iterator[tuple[Process, Target]]:
    """Start a process that holds so many MiB; thaw and end it at exit.

    It is of the kind that a nodeagent suspends.
    """
    process = spawn(mib)
    try:
        yield process, Target("i", "vllm", ("cuda:0",), groups.gather("i", process.child.pid, include_host=True))
    finally:
        groups.thaw("i")
        process.child.kill()
        process.child.wait()


@pytest.mark.parametrize("mib", [256, 1024, 4096])
async def test_process_frees_device_memory_and_restores_it(
    device: CudaDevice, way: CudaCheckpoint, groups: Cgroups, mib: int
) -> None:
    with computing(groups, mib) as (process, target):
        before = process.ask()
        used = device.used_bytes(0, 0)
        started = time.perf_counter()
        taken = await way.suspend(target)
        suspended_ms = (time.perf_counter() - started) * 1e3
        assert taken.left_bytes <= 0.1 * taken.used_bytes
        assert used - device.used_bytes(0, 0) >= 0.9 * mib * MIB, "the device itself says so"
        started = time.perf_counter()
        await way.resume(target)
        restored_ms = (time.perf_counter() - started) * 1e3
        assert process.ask() == before
        moved = taken.freed_bytes
        sys.stdout.write(
            f"{moved / MIB:.0f} MiB: suspended in {suspended_ms:.0f} ms, restored in {restored_ms:.0f} ms "
            f"({moved / restored_ms / 1e6:.1f} GB/s)\n"
        )


async def test_a_snapshot_is_restored_onto_another_gpu(device: CudaDevice, groups: Cgroups) -> None:
    nvml = load_nvml()
    driver, reason = open_driver(nvml)
    if driver is None or not driver.can_move():
        pytest.skip(reason or "this driver or cuda-bindings cannot restore onto another GPU (580 and 13.0 can)")
    gpus = gpus_of(nvml, [f"cuda:{i}" for i in range(nvml.nvmlDeviceGetCount())] if nvml is not None else [])
    if not (others := others_of_kind(gpus, "cuda:0")):
        pytest.skip("no second GPU of the kind of cuda:0")
    other = CudaDevice(nvml, int(others[0].removeprefix("cuda:")), 0.9, None)
    way = CudaCheckpoint(driver, reason, groups, MemoryUsage({"cuda:0": device, others[0]: other}), gpus)
    with computing(groups, 256) as (process, target):
        before = process.ask()
        assert others[0] in way.outlook(target).moves_to
        taken = await way.suspend(target)
        assert taken.left_bytes == 0, "what stays on the old GPU forbids a move"
        moved = replace(target, device_ids=(others[0],), moved_from=("cuda:0",))
        await way.resume(moved)
        assert process.ask() == before
        assert device.private_bytes(target.pids) == {}
        assert sum(other.private_bytes(target.pids).values()) >= 256 * MIB


async def test_a_snapshot_is_paged_out_and_restored(way: CudaCheckpoint, groups: Cgroups) -> None:
    """The test shows whether the driver keeps snapshots in pageable memory."""
    if why := way.explain_spill_unavailable():
        pytest.skip(why)
    with computing(groups, 512) as (process, target):
        before = process.ask()
        await way.suspend(target)
        freed = await way.spill(target)
        sys.stdout.write(f"{freed / MIB:.0f} MiB of host memory went to swap\n")
        await way.resume(target)
        assert process.ask() == before


async def test_engine_of_several_processes_is_locked_and_restored_as_a_whole(way: CudaCheckpoint, groups: Cgroups) -> None:
    """An engine of several processes is locked and restored as a whole.

    Lock all, checkpoint all, then freeze; thaw, restore all, unlock all: the order of
    CudaCheckpoint.
    """
    processes = [spawn(256), spawn(64)]
    try:
        before = [p.ask() for p in processes]
        pids = {pid for p in processes for pid in groups.gather("i", p.child.pid, include_host=True)}
        driver, _ = open_driver(load_nvml())
        assert driver is not None
        target = Target("i", "vllm", ("cuda:0",), tuple(sorted(pids)))
        await way.suspend(target)
        assert groups.is_frozen("i") == groups.available
        # The driver asks the process itself for its state: a frozen process may not answer.
        groups.thaw("i")
        assert [driver.state(p.child.pid) for p in processes] == [State.CHECKPOINTED] * 2
        await way.resume(target)
        assert not groups.is_frozen("i")
        assert [p.ask() for p in processes] == before
    finally:
        groups.thaw("i")
        for process in processes:
            process.child.kill()
            process.child.wait()


FIRST_FROZEN = """
import sys
from services.nodeagent.devices.cuda import load_nvml
from services.nodeagent.suspend.cuda import open_driver
from shared.errors import EngineFailed
driver, reason = open_driver(load_nvml())
try:
    driver.lock(int(sys.argv[1]), 2000)
    driver.checkpoint(int(sys.argv[1]))
    print("it was locked and checkpointed")
except EngineFailed as e:
    print(e.message)
"""
HANGS_AFTER_S = 30.0


async def test_freezing_before_the_lock_hangs_or_returns(way: CudaCheckpoint, groups: Cgroups) -> None:
    """Print what this driver does in the paper's order, which freezes first.

    CRIU's maintainers found that this hangs. If the driver answers, the process continues.
    """
    if not groups.available:
        pytest.skip(groups.reason)
    with computing(groups, 64) as (process, target):
        before = process.ask()
        await asyncio.to_thread(groups.freeze, "i")
        asking = [sys.executable, "-c", FIRST_FROZEN, str(process.child.pid)]
        try:
            done = subprocess.run(asking, capture_output=True, text=True, timeout=HANGS_AFTER_S, check=False)  # noqa: ASYNC221
            found = done.stdout.strip() or done.stderr[-500:]
        except subprocess.TimeoutExpired:
            sys.stdout.write(f"frozen before it was locked: no answer within {HANGS_AFTER_S:g} s\n")
            return
        sys.stdout.write(f"frozen before it was locked: {found}\n")
        await way.resume(target)
        assert process.ask() == before


async def test_the_states_follow_the_published_order(way: CudaCheckpoint, groups: Cgroups) -> None:
    process = spawn(64)
    try:
        pid = process.child.pid
        process.ask()
        driver, _ = open_driver(load_nvml())
        assert driver is not None
        assert driver.state(pid) is State.RUNNING
        driver.lock(pid, 10_000)
        assert driver.state(pid) is State.LOCKED
        driver.checkpoint(pid)
        assert driver.state(pid) is State.CHECKPOINTED
        driver.restore(pid)
        assert driver.state(pid) is State.LOCKED
        driver.unlock(pid)
        assert driver.state(pid) is State.RUNNING
    finally:
        process.child.kill()
        process.child.wait()
