"""CUDA checkpoint: the driver copies device memory to host memory.

The device is freed, and the processes are frozen.

Order, for every process with a context: lock all, checkpoint all, then freeze; thaw, restore all,
unlock all. Freezing before all are locked hangs, and CUDA may misbehave while frozen, according to
CRIU's maintainers. Requires driver 570 or later and the package cuda-bindings.

A call may hang: each suspension and resume has a thread of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from enum import IntEnum
from importlib import import_module
from typing import Any, Protocol
from uuid import UUID

from services.nodeagent.devices.cpu import available_bytes
from services.nodeagent.devices.driver_thread import run_in_own_thread
from services.nodeagent.domain.state import Outlook
from services.nodeagent.suspend import memory
from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.estimates import SuspendEstimates
from services.nodeagent.suspend.gpu_pairs import Gpu, Pairs, others_of_kind, pairs
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import UNPROVABLE, SuspendResult, Target
from shared.contracts.node import SuspendWay
from shared.errors import CannotSuspend, EngineFailed, PermissionDenied, RestoreFailed

log = logging.getLogger(__name__)
LEAST_DRIVER = 570
LEAST_MOVING_DRIVER = 580
"""The first driver that restores onto another GPU."""
_LOCK_TIMEOUT_MS = 10_000
_UUID_BYTES = 16
_LEAST_FREED = 0.5
_FOR_SPILLING = {memory.CAP_SYS_NICE: "CAP_SYS_NICE", memory.CAP_SYS_PTRACE: "CAP_SYS_PTRACE"}
_SINGLE_PROCESS_NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
"""NCCL features that cannot be checkpointed and must be off if an engine has several devices."""

_OWN_LINKS = ("vllm", "sglang")
"""Engines with their own links beside NCCL's, over memory shared by CUDA IPC."""


class State(IntEnum):
    """`CUprocessState`.

    Thaw does not use the last two, which are for checkpoints in custom storage.
    """

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5


class CheckpointDriver(Protocol):
    """The driver's checkpoint calls.

    Each raises `EngineFailed` with the driver's message.
    """

    def version(self) -> int:
        """Major version of the installed driver."""
        ...

    def state(self, pid: int) -> State | None:
        """State of a process; None if it has no CUDA context."""
        ...

    def lock(self, pid: int, timeout_ms: int) -> None: ...
    def checkpoint(self, pid: int) -> None: ...
    def restore(self, pid: int, pairs: Pairs = ()) -> None:
        """Restore a process; with `pairs`, which name every GPU, onto other GPUs."""
        ...

    def unlock(self, pid: int) -> None: ...

    def can_move(self) -> bool:
        """True if `restore` takes pairs."""
        ...


class CudaBindings:
    """`CheckpointDriver` through cuda-bindings.

    Args:
        driver: The module `cuda.bindings.driver`.
        nvml: The module `pynvml`.
    """

    def __init__(self, driver: Any, nvml: Any) -> None:
        self._driver = driver
        text = nvml.nvmlSystemGetDriverVersion()  # once: NVML may hang later
        self._version = int((text.decode() if isinstance(text, bytes) else text).split(".")[0])
        self._call("cuInit", 0)

    def version(self) -> int:
        return self._version

    def state(self, pid: int) -> State | None:
        code, found = self._driver.cuCheckpointProcessGetState(pid)
        if int(code) != 0:
            return None
        return State(int(found)) if int(found) in State._value2member_map_ else State.FAILED

    def lock(self, pid: int, timeout_ms: int) -> None:
        args = self._driver.CUcheckpointLockArgs()
        args.timeoutMs = timeout_ms
        self._call("cuCheckpointProcessLock", pid, args)

    def checkpoint(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, pairs: Pairs = ()) -> None:
        args = None
        if pairs:
            args = self._driver.CUcheckpointRestoreArgs()
            args.gpuPairs = [self._pair(old, new) for old, new in pairs]
            args.gpuPairsCount = len(pairs)
        self._call("cuCheckpointProcessRestore", pid, args)

    def can_move(self) -> bool:
        # Earlier bindings have the arguments without this type.
        return hasattr(self._driver, "CUcheckpointGpuPair") and self.version() >= LEAST_MOVING_DRIVER

    def _pair(self, old: str, new: str) -> Any:
        pair = self._driver.CUcheckpointGpuPair()
        pair.oldUuid, pair.newUuid = self._uuid(old), self._uuid(new)
        return pair

    def _uuid(self, text: str) -> Any:
        """Return NVML's text of a UUID ("GPU-8f4022ba-…") as CUDA's structure."""
        found = self._driver.CUuuid()
        ctypes.memmove(found.getPtr(), UUID(text.removeprefix("GPU-")).bytes, _UUID_BYTES)
        return found

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, None)

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._driver, name)(*args)[0]
        if int(code) != 0:
            raise EngineFailed(f"{name}{f' of pid {args[0]}' if len(args) > 1 else ''} failed: {getattr(code, 'name', code)}")


def open_driver(nvml: Any | None) -> tuple[CheckpointDriver | None, str]:
    """Return the driver's checkpoint calls, or the reason why there are none."""
    if nvml is None:
        return None, "there is no NVIDIA driver (NVML) on this node"
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError:
        return None, "the package cuda-bindings is not installed (pip install 'thaw-mesh[cuda]')"
    if not hasattr(driver, "cuCheckpointProcessLock"):
        return None, "this cuda-bindings has no checkpoint calls (12.8 or later is needed)"
    try:
        found = CudaBindings(driver, nvml)
        version = found.version()
    except (EngineFailed, RuntimeError) as e:
        return None, f"the CUDA driver cannot be used: {e}"
    if version < LEAST_DRIVER:
        return None, f"NVIDIA driver {version} has no checkpoint calls: {LEAST_DRIVER} or later is needed"
    return found, ""


class CudaCheckpoint:
    """Suspends engines by CUDA checkpoint."""

    name: SuspendWay = "cuda"

    def __init__(
        self,
        driver: CheckpointDriver | None,
        reason: str,
        cgroups: Cgroups,
        memory_usage: MemoryUsage,
        gpus: tuple[Gpu, ...] = (),
    ) -> None:
        """Create the method.

        Args:
            driver: The checkpoint calls; None: there are none.
            reason: Why there are none.
            cgroups: The engines' control groups.
            memory_usage: Reads the memory that engines use.
            gpus: The machine's GPUs, onto which snapshots may be restored.
        """
        self._driver = driver
        self._gpus = gpus
        self._reason = reason
        self._cgroups = cgroups
        self._memory_usage = memory_usage
        self._estimates = SuspendEstimates(left=0.0, resume_bytes_per_s=10e9, least_resume_s=0.3)
        self._spilled: set[str] = set()
        self._checkpointed: dict[str, tuple[int, ...]] = {}
        """Processes that this agent has suspended, by instance."""

    def explain_unavailable(self) -> str:
        return self._reason

    def outlook(self, target: Target) -> Outlook:
        why = self._reason or ("" if target.on_cuda else "it runs on cpu") or _several_devices(target)
        if why:
            return Outlook(reason=why)
        used = self._memory_usage.used_bytes(target)
        if used == 0:
            return Outlook(reason=UNPROVABLE)
        left = int(used * self._estimates.left)
        return Outlook(
            way="cuda",
            left_bytes=left,
            snapshot_bytes=used - left,
            resume_s=self._estimates.resume_s(used - left),
            moves_to=self._moves_to(target),
        )

    def _moves_to(self, target: Target) -> tuple[str, ...]:
        """Return the other GPUs that a snapshot of the engine could be restored onto.

        A container sees only the GPUs that it was started with.
        """
        if self._driver is None or len(target.device_ids) != 1 or target.in_container or not self._driver.can_move():
            return ()
        return others_of_kind(self._gpus, target.device_ids[0])

    async def suspend(self, target: Target) -> SuspendResult:
        taken = await run_in_own_thread(self._suspend, target)
        self._estimates = self._estimates.learn_suspended(taken.used_bytes, taken.left_bytes)
        return taken

    def _suspend(self, target: Target) -> SuspendResult:
        driver = self._require_driver()
        pids = self._contexts(target)
        if not pids:
            raise CannotSuspend("None of the engine's processes has a CUDA context that this node can see")
        used = self._memory_usage.used_bytes(target)
        if used == 0:
            raise CannotSuspend(UNPROVABLE)
        room = available_bytes() + memory.swap_space().free
        if used > room:
            raise CannotSuspend(f"{used >> 20} MiB of device memory do not fit the {room >> 20} MiB of free host memory and swap")
        try:
            host = memory.footprint(target.pids).pss
            for pid in pids:
                driver.lock(pid, _LOCK_TIMEOUT_MS)
            for pid in pids:
                driver.checkpoint(pid)
            if self._can_freeze(target):
                self._cgroups.freeze(target.instance_id)
            left = self._memory_usage.used_bytes(target)
            if used - left < _LEAST_FREED * used:
                raise EngineFailed(f"After the checkpoint {left >> 20} of {used >> 20} MiB are still in use on the device")
            self._checkpointed[target.instance_id] = tuple(pids)
            return SuspendResult(used, left, max(used - left, memory.footprint(target.pids).pss - host))
        except (EngineFailed, PermissionDenied, OSError) as e:
            self._undo(driver, target, pids)
            raise CannotSuspend(e.message if isinstance(e, EngineFailed | PermissionDenied) else str(e)) from e

    def _can_freeze(self, target: Target) -> bool:
        """True if there is a group to freeze: a container's may belong to another user."""
        is_outside = target.in_container and self._cgroups.list_outside(target.instance_id, target.pids)
        return self._cgroups.available and not is_outside

    async def resume(self, target: Target) -> None:
        try:
            await run_in_own_thread(self._resume, target)
        except EngineFailed as e:
            raise RestoreFailed(e.message) from e
        except OSError as e:
            raise RestoreFailed(f"The engine's control group cannot be thawed: {e}") from e

    def explain_spill_unavailable(self) -> str:
        """The reason why snapshots cannot be written to swap; empty if they can."""
        if memory.swap_space().total == 0:
            return "this machine has no swap (`thaw doctor --fix` sets it up)"
        if not self._cgroups.available:
            return f"engines cannot be frozen: {self._cgroups.reason}"
        lacking = [n for c, n in _FOR_SPILLING.items() if not memory.has_capability(c)]
        return f"the nodeagent lacks {' and '.join(lacking)}" if lacking else ""

    async def spill(self, target: Target) -> int:
        """Write the snapshot, memory of frozen processes, to swap.

        Returns:
            Bytes of host memory freed.

        Raises:
            CannotSuspend: The snapshot stays in host memory.
        """
        return await run_in_own_thread(self._spill, target)

    def _spill(self, target: Target) -> int:
        try:
            if why := self.explain_spill_unavailable():
                raise EngineFailed(why)
            before = memory.footprint(target.pids)
            if before.pss > memory.swap_space().free:
                raise EngineFailed(f"{before.pss >> 20} MiB do not fit the free swap")
            after = memory.page_out(target.pids, before.pss + before.swap)
        except (EngineFailed, PermissionDenied, OSError) as e:
            raise CannotSuspend(e.message if isinstance(e, EngineFailed | PermissionDenied) else str(e)) from e
        freed = before.pss - after.pss
        if freed < _LEAST_FREED * before.pss:
            raise CannotSuspend(
                f"Only {max(0, freed) >> 20} of {before.pss >> 20} MiB were written to swap: the rest is locked or shared"
            )
        self._spilled.add(target.instance_id)
        return freed

    def _resume(self, target: Target) -> None:
        driver = self._require_driver()
        if target.instance_id in self._spilled:
            self._spilled.discard(target.instance_id)
            with contextlib.suppress(EngineFailed, PermissionDenied, OSError):  # otherwise the driver's reads page it in
                memory.page_in(target.pids)
        self._cgroups.thaw(target.instance_id)
        states = {pid: driver.state(pid) for pid in target.pids}
        for pid in self._checkpointed.pop(target.instance_id, ()):
            if states.get(pid) is None:
                raise EngineFailed(f"The driver does not know pid {pid} any more, which it has checkpointed")
        for pid, state in states.items():
            if state in (State.FAILED, State.CHECKPOINTING, State.RESTORING):
                raise EngineFailed(f"The driver failed for pid {pid}: its state is {state.name.lower()}")
        moved = pairs(self._gpus, target.moved_from, target.device_ids) if target.moved_from else ()
        for pid, state in states.items():
            if state is State.CHECKPOINTED:
                driver.restore(pid, moved)
        for pid in states:
            if driver.state(pid) is State.LOCKED:
                driver.unlock(pid)

    def _contexts(self, target: Target) -> list[int]:
        """The engine's processes with a CUDA context.

        They are NVML's compute processes; in a pid namespace, where NVML's pids do not match, the
        driver is asked for each.
        """
        driver = self._require_driver()
        seen = sorted(self._memory_usage.by_process(target.device_ids, target.pids))
        return seen or [pid for pid in target.pids if driver.state(pid) is not None]

    def _undo(self, driver: CheckpointDriver, target: Target, pids: list[int]) -> None:
        with contextlib.suppress(OSError):
            self._cgroups.thaw(target.instance_id)
        for pid in pids:
            with contextlib.suppress(EngineFailed):
                if driver.state(pid) is State.CHECKPOINTED:
                    driver.restore(pid)
        for pid in pids:
            with contextlib.suppress(EngineFailed):
                if driver.state(pid) is State.LOCKED:
                    driver.unlock(pid)

    def forget(self, instance_id: str) -> None:
        self._spilled.discard(instance_id)
        self._checkpointed.pop(instance_id, None)

    def rename(self, old: str, new: str) -> None:
        self.forget(old)  # a restored engine has no state here

    def learn(self, snapshot_bytes: int, took_s: float) -> None:
        self._estimates = self._estimates.learn_resumed(snapshot_bytes, took_s)

    def _require_driver(self) -> CheckpointDriver:
        if self._driver is None:
            raise EngineFailed(self._reason)
        return self._driver


def _several_devices(target: Target) -> str:
    """The reason why an engine with several devices cannot be checkpointed.

    NCCL uses peer-to-peer and shared memory links.
    """
    if len(target.device_ids) < 2 or all(target.environment.get(k) == v for k, v in _SINGLE_PROCESS_NCCL.items()):
        return ""
    needed = ", ".join(f"{k}={v}" for k, v in _SINGLE_PROCESS_NCCL.items())
    reason = (
        f"it has {len(target.device_ids)} devices, and NCCL's links between them cannot be checkpointed: set {needed} in its env"
    )
    own = ", and disable_custom_all_reduce: true in its engine_args" if target.engine in _OWN_LINKS else ""
    return reason + own
