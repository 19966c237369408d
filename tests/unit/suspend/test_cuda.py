"""CUDA checkpoint on a fake driver: call order, rollback, and refusals.

tests/gpu has the real driver.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from services.nodeagent.suspend import cuda, memory
from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.cuda import CudaBindings, CudaCheckpoint, State, open_driver
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import Target
from shared.errors import CannotSuspend, DeviceFailed, EngineFailed, PermissionDenied, RestoreFailed
from tests.unit.suspend.fake_driver import FakeDriver, FakeGpu
from tests.unit.suspend.frozen_groups import GIB, A, B, C, Frozen

NO_GROUPS = Cgroups("n", None, None, "none here")


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver({A: 3 * GIB, B: GIB})


def way(driver: FakeDriver, groups: Cgroups | None = None, *, sees_pids: bool = True) -> CudaCheckpoint:
    return CudaCheckpoint(driver, "", groups or Frozen(driver), MemoryUsage({"cuda:0": FakeGpu(driver, sees_pids=sees_pids)}))


def target(*devices: str, **environment: str) -> Target:
    return Target("i", "vllm", devices or ("cuda:0",), (A, B, C), hosted=True, environment=environment)


async def test_all_are_locked_then_checkpointed_then_frozen(driver: FakeDriver) -> None:
    taken = await way(driver).suspend(target())
    assert [c for c, _ in driver.calls] == ["lock", "lock", "checkpoint", "checkpoint", "freeze"]
    assert (taken.used_bytes, taken.left_bytes) == (4 * GIB, 0)
    assert taken.snapshot_bytes == 4 * GIB


async def test_all_are_thawed_then_restored_then_unlocked(driver: FakeDriver) -> None:
    w = way(driver)
    await w.suspend(target())
    driver.calls.clear()
    await w.resume(target())
    assert [c for c, _ in driver.calls] == ["thaw", "restore", "restore", "unlock", "unlock"]
    assert set(driver.states.values()) == {State.RUNNING}


async def test_without_a_freezer_processes_are_only_checkpointed(driver: FakeDriver) -> None:
    await way(driver, NO_GROUPS).suspend(target())
    assert [c for c, _ in driver.calls] == ["lock", "lock", "checkpoint", "checkpoint"]


class OfAnotherUser(Frozen):
    """The group of a container that this process may not freeze."""

    def list_outside(self, instance_id: str, pids: tuple[int, ...]) -> tuple[int, ...]:
        return pids


async def test_container_whose_group_cannot_be_frozen_is_only_checkpointed(driver: FakeDriver) -> None:
    """A restarted agent has removed the instance's own group, which is empty."""
    groups = OfAnotherUser(driver)
    groups.fails = FileNotFoundError(2, "No such file or directory")
    await way(driver, groups).suspend(replace(target(), in_container=True))
    assert [c for c, _ in driver.calls] == ["lock", "lock", "checkpoint", "checkpoint"]


@pytest.mark.parametrize("fault", [("lock", B), ("checkpoint", B), ("freeze", 0)], ids=lambda f: f[0])
async def test_partial_suspension_is_undone(driver: FakeDriver, fault: tuple[str, int]) -> None:
    groups = Frozen(driver)
    groups.fails = EngineFailed("the engine's processes could not be frozen") if fault[0] == "freeze" else None
    driver.fails.add(fault)
    with pytest.raises(CannotSuspend, match=r"failed|could not be frozen"):
        await way(driver, groups).suspend(target())
    assert set(driver.states.values()) == {State.RUNNING}


async def test_missing_control_group_undoes_the_suspension(driver: FakeDriver) -> None:
    groups = Frozen(driver)
    groups.fails = FileNotFoundError(2, "No such file or directory")
    with pytest.raises(CannotSuspend, match="No such file"):
        await way(driver, groups).suspend(target())
    assert set(driver.states.values()) == {State.RUNNING}


async def test_unreadable_memory_after_the_checkpoint_undoes_the_suspension(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def footprint(pids: object) -> memory.Footprint:
        if driver.calls:
            raise PermissionDenied("reading an engine's memory (smaps_rollup) needs CAP_SYS_PTRACE")
        return memory.Footprint()

    monkeypatch.setattr(memory, "footprint", footprint)
    with pytest.raises(CannotSuspend, match="CAP_SYS_PTRACE"):
        await way(driver).suspend(target())
    assert set(driver.states.values()) == {State.RUNNING}


async def test_gpu_lost_after_the_checkpoint_undoes_the_suspension(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(gpu: FakeGpu, pids: object) -> dict[int, int]:
        if ("checkpoint", B) in driver.calls:
            raise DeviceFailed("NVML cannot read cuda:0")
        return driver.device_bytes()

    monkeypatch.setattr(FakeGpu, "private_bytes", read)
    with pytest.raises(CannotSuspend, match="NVML cannot read"):
        await way(driver).suspend(target())
    assert set(driver.states.values()) == {State.RUNNING}


async def test_suspension_is_refused_if_host_memory_lacks_room(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(memory, "swap_space", lambda: memory.Swap(2 * GIB, GIB))
    with pytest.raises(CannotSuspend, match="4096 MiB of device memory do not fit the 3072 MiB"):
        await way(driver).suspend(target())
    assert driver.calls == []


async def test_checkpoint_that_frees_nothing_is_undone(driver: FakeDriver) -> None:
    driver.keeps = True
    with pytest.raises(CannotSuspend, match="still in use"):
        await way(driver).suspend(target())
    assert set(driver.states.values()) == {State.RUNNING}


async def test_half_a_suspension_of_a_dead_agent_is_undone(driver: FakeDriver) -> None:
    driver.states = {A: State.CHECKPOINTED, B: State.LOCKED}
    await way(driver).resume(target())
    assert set(driver.states.values()) == {State.RUNNING}


async def test_failed_restore_is_reported(driver: FakeDriver) -> None:
    w = way(driver)
    await w.suspend(target())
    driver.fails.add(("restore", A))
    with pytest.raises(RestoreFailed, match=f"restore of pid {A}"):
        await w.resume(target())
    driver.states[A] = State.FAILED
    with pytest.raises(RestoreFailed, match=f"The driver failed for pid {A}"):
        await w.resume(target())


async def test_checkpointed_process_that_the_driver_forgets_is_not_resumed(driver: FakeDriver) -> None:
    """The driver answers with an error, as for a process without a context."""
    w = way(driver)
    await w.suspend(target())
    del driver.states[B]
    with pytest.raises(RestoreFailed, match=f"does not know pid {B}"):
        await w.resume(target())


async def test_suspension_in_a_separate_pid_namespace_is_refused(driver: FakeDriver) -> None:
    with pytest.raises(CannotSuspend, match="could not be verified"):
        await way(driver, sees_pids=False).suspend(target())
    assert driver.calls == []
    assert "could not be verified" in way(driver, sees_pids=False).outlook(target()).reason


def test_several_devices_need_nccl_without_shared_memory(driver: FakeDriver) -> None:
    refused = way(driver).outlook(target("cuda:0", "cuda:1"))
    assert refused.way is None
    assert "NCCL_P2P_DISABLE=1" in refused.reason
    assert "disable_custom_all_reduce" in refused.reason
    allowed = target("cuda:0", "cuda:1", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_NVLS_ENABLE="0")
    assert way(driver).outlook(allowed).way == "cuda"


def test_suspension_cost_is_learned(driver: FakeDriver) -> None:
    w = way(driver)
    first = w.outlook(target())
    assert first.snapshot_bytes == 4 * GIB
    w.learn(4 * GIB, 4.0)
    assert w.outlook(target()).resume_s > first.resume_s


# The binding.


def test_missing_driver_or_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no NVIDIA driver" in open_driver(None)[1]

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(cuda, "import_module", missing)
    assert "cuda-bindings is not installed" in open_driver(SimpleNamespace())[1]


class Api:
    """`cuda.bindings.driver`, as its documentation describes it."""

    class CUcheckpointLockArgs:
        timeoutMs = 0

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.code = 0

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[int, int]:
        return (0, 2) if pid == 1 else (1, 0)

    def cuCheckpointProcessLock(self, pid: int, args: CUcheckpointLockArgs) -> tuple[int]:
        self.asked.append(("lock", pid, args.timeoutMs))
        return (self.code,)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuCheckpointProcess"):
            raise AttributeError(name)

        def call(pid: int, args: Any) -> tuple[int]:
            self.asked.append((name, pid) if args is None else (name, pid, args))
            return (self.code,)

        return call

    class CUuuid:
        def __init__(self) -> None:
            self.raw = ctypes.create_string_buffer(16)

        def getPtr(self) -> int:
            return ctypes.addressof(self.raw)

    class CUcheckpointGpuPair:
        oldUuid: Api.CUuuid
        newUuid: Api.CUuuid

    class CUcheckpointRestoreArgs:
        gpuPairs: tuple[Api.CUcheckpointGpuPair, ...] = ()
        gpuPairsCount = 0


def bindings(api: Api, version: str = "580.12.3") -> CudaBindings:
    return CudaBindings(api, SimpleNamespace(nvmlSystemGetDriverVersion=lambda: version))


def test_the_binding_calls_the_driver_as_documented() -> None:
    api = Api()
    found = bindings(api)
    assert found.version() == 580
    assert found.state(1) is State.CHECKPOINTED
    assert found.state(9) is None
    found.lock(1, 500)
    found.checkpoint(1)
    found.restore(1)
    found.unlock(1)
    assert api.asked == [
        ("lock", 1, 500),
        ("cuCheckpointProcessCheckpoint", 1),
        ("cuCheckpointProcessRestore", 1),
        ("cuCheckpointProcessUnlock", 1),
    ]
    api.code = 801
    with pytest.raises(EngineFailed, match="cuCheckpointProcessLock of pid 1 failed: 801"):
        found.lock(1, 500)


def test_pairs_are_passed_as_the_drivers_structures() -> None:
    api = Api()
    old, new = "GPU-8f4022ba-e0cb-1298-286e-225c953a7feb", "GPU-5449fdd5-fb83-f4ed-37a3-ea1057d82160"
    bindings(api).restore(1, ((old, new), (new, old)))
    [(_, pid, args)] = api.asked
    assert isinstance(args, Api.CUcheckpointRestoreArgs)
    assert (pid, args.gpuPairsCount, len(args.gpuPairs)) == (1, 2, 2)
    assert args.gpuPairs[0].oldUuid.raw.raw.hex() == old.removeprefix("GPU-").replace("-", "")
    assert args.gpuPairs[0].newUuid.raw.raw == args.gpuPairs[1].oldUuid.raw.raw


@pytest.mark.parametrize(("version", "expected"), [("575.57", False), ("580.65.06", True), ("595.1", True)])
def test_snapshots_move_from_driver_580_on(version: str, expected: bool) -> None:
    assert bindings(Api(), version).can_move() == expected


def test_bindings_without_pairs_cannot_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Api, "CUcheckpointGpuPair")
    assert not bindings(Api()).can_move()


def test_the_package_takes_pairs_as_thaw_passes_them() -> None:
    api = pytest.importorskip("cuda.bindings.driver")
    if not hasattr(api, "CUcheckpointGpuPair"):
        pytest.skip("this cuda-bindings has no GPU pairs (13.0 or later is needed)")
    found = CudaBindings.__new__(CudaBindings)
    found._driver = api
    uuid = "8f4022ba-e0cb-1298-286e-225c953a7feb"
    pair = found._pair(f"GPU-{uuid}", "GPU-5449fdd5-fb83-f4ed-37a3-ea1057d82160")
    assert bytes(pair.oldUuid.bytes).hex() == uuid.replace("-", "")
    args = api.CUcheckpointRestoreArgs()
    args.gpuPairs, args.gpuPairsCount = [pair], 1
    assert bytes(args.gpuPairs[0].oldUuid.bytes) == bytes(pair.oldUuid.bytes)


def test_cuda_bindings_package_has_the_functions_that_thaw_calls() -> None:
    """The cuda-bindings package has the functions that Thaw calls.

    It can be inspected without a driver: 12.8.0, 13.0.3 and 13.5.0 were.
    """
    api = pytest.importorskip("cuda.bindings.driver")
    args = api.CUcheckpointLockArgs()
    args.timeoutMs = 500
    assert args.timeoutMs == 500
    for call in ("Lock", "Checkpoint", "Restore", "Unlock"):
        name = f"cuCheckpointProcess{call}"
        assert getattr(api, name).__doc__.startswith(f"{name}(int pid, CUcheckpoint{call}Args args: Optional")
    assert api.cuCheckpointProcessGetState.__doc__.startswith("cuCheckpointProcessGetState(int pid)")
    known = {state.name: int(state) for state in State}
    theirs = {
        n.removeprefix("CU_PROCESS_STATE_"): int(getattr(api.CUprocessState, n)) for n in dir(api.CUprocessState) if n[:3] == "CU_"
    }
    assert {name: known.get(name) for name in theirs} == theirs


def test_old_driver_is_refused_with_the_required_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "import_module", lambda _: Api())
    driver, reason = open_driver(SimpleNamespace(nvmlSystemGetDriverVersion=lambda: "565.57"))
    assert driver is None
    assert "570 or later" in reason


async def test_call_that_hangs_keeps_no_thread_of_others(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent measures and cleans up in a few threads, and waits for them when it ends."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    hangs, ends = threading.Event(), threading.Event()

    def lock(self: FakeDriver, pid: int, timeout_ms: int) -> None:
        hangs.set()
        assert ends.wait(60)
        raise EngineFailed("the engine has been killed")

    monkeypatch.setattr(FakeDriver, "lock", lock)
    suspending = asyncio.create_task(way(driver).suspend(target()))
    try:
        async with asyncio.timeout(30):
            while not hangs.is_set():  # noqa: ASYNC110  # set by a thread
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(lambda: 1) == 1
    finally:
        ends.set()
    with pytest.raises(CannotSuspend, match="has been killed"):
        await suspending
