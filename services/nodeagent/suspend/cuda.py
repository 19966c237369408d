"""CUDA checkpoint: the driver copies a process's device memory into host memory and gives the device up; the processes are frozen after.

Order, for every process that holds a context: lock all, checkpoint all, then freeze; thaw, restore all, unlock all. (Freezing before all are
locked hangs, and CUDA may misbehave while frozen: CRIU's maintainers.) Needs driver 570 or later and the package cuda-bindings.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from enum import IntEnum
from importlib import import_module
from typing import Any, Protocol

from services.nodeagent.devices.cpu import available_bytes
from services.nodeagent.domain.state import Outlook
from services.nodeagent.suspend import memory
from services.nodeagent.suspend.cgroups import Groups
from services.nodeagent.suspend.estimates import Rates
from services.nodeagent.suspend.memory_usage import Gauge
from services.nodeagent.suspend.port import UNPROVABLE, Taken, Target
from shared.contracts.node import SuspendWay
from shared.errors import CannotSuspend, EngineFailed, PermissionDenied, RestoreFailed

log = logging.getLogger(__name__)
LEAST_DRIVER = 570
_LOCK_TIMEOUT_MS = 10_000
_LEAST_FREED = 0.5
_FOR_SPILLING = {memory.CAP_SYS_NICE: "CAP_SYS_NICE", memory.CAP_SYS_PTRACE: "CAP_SYS_PTRACE"}
_SINGLE_PROCESS_NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
"""What cannot be checkpointed of NCCL must be off where an engine has several devices."""

_OWN_LINKS = ("vllm", "sglang")
"""Engines that have links of their own beside NCCL's, over memory that processes share (CUDA IPC)."""


class State(IntEnum):
    """`CUprocessState`. The last two are of those who keep checkpoints in storage of their own: we do not."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5


class CheckpointDriver(Protocol):
    """The driver's checkpoint calls. Each raises `EngineFailed` with the driver's own words."""

    def version(self) -> int:
        """Major version of the installed driver."""
        ...

    def state(self, pid: int) -> State | None:
        """None: the process holds no CUDA context."""
        ...

    def lock(self, pid: int, timeout_ms: int) -> None: ...
    def checkpoint(self, pid: int) -> None: ...
    def restore(self, pid: int) -> None: ...
    def unlock(self, pid: int) -> None: ...


class CudaBindings:
    """`CheckpointDriver` by cuda-bindings. `driver` is its module `cuda.bindings.driver`."""

    def __init__(self, driver: Any, nvml: Any) -> None:
        self._driver = driver
        self._nvml = nvml
        self._call("cuInit", 0)

    def version(self) -> int:
        text = self._nvml.nvmlSystemGetDriverVersion()
        return int((text.decode() if isinstance(text, bytes) else text).split(".")[0])

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

    def restore(self, pid: int) -> None:
        self._call("cuCheckpointProcessRestore", pid, None)

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, None)

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._driver, name)(*args)[0]
        if int(code) != 0:
            raise EngineFailed(f"{name}{f' of pid {args[0]}' if len(args) > 1 else ''} failed: {getattr(code, 'name', code)}")


def open_driver(nvml: Any | None) -> tuple[CheckpointDriver | None, str]:
    """The driver's checkpoint calls, or why there are none."""
    if nvml is None:
        return None, "there is no NVIDIA driver (NVML) on this node"
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError:
        return None, "the package cuda-bindings is not installed (pip install 'thaw-mesh[cuda]')"
    if not hasattr(driver, "cuCheckpointProcessLock"):
        return None, "this cuda-bindings knows no checkpoint calls (12.8 or later is needed)"
    try:
        found = CudaBindings(driver, nvml)
        version = found.version()
    except (EngineFailed, RuntimeError) as e:
        return None, f"the CUDA driver cannot be used: {e}"
    if version < LEAST_DRIVER:
        return None, f"NVIDIA driver {version} has no checkpoint calls: {LEAST_DRIVER} or later is needed"
    return found, ""


class CudaWay:
    name: SuspendWay = "cuda"

    def __init__(self, driver: CheckpointDriver | None, reason: str, groups: Groups, gauge: Gauge) -> None:
        self._driver = driver
        self._reason = reason
        self._groups = groups
        self._gauge = gauge
        self._rates = Rates(left=0.0, resume_bytes_per_s=10e9, least_resume_s=0.3)
        self._spilled: set[str] = set()

    def unavailable(self) -> str:
        return self._reason

    def outlook(self, target: Target) -> Outlook:
        why = self._reason or ("" if target.on_cuda else "it runs on cpu") or _several_devices(target)
        if why:
            return Outlook(reason=why)
        used = self._gauge.used(target)
        if used == 0:
            return Outlook(reason=UNPROVABLE)
        left = int(used * self._rates.left)
        return Outlook(way="cuda", left_bytes=left, snapshot_bytes=used - left, resume_s=self._rates.resume_s(used - left))

    async def suspend(self, target: Target) -> Taken:
        taken = await asyncio.to_thread(self._suspend, target)
        self._rates = self._rates.suspended(taken.used_bytes, taken.left_bytes)
        return taken

    def _suspend(self, target: Target) -> Taken:
        driver = self._there()
        pids = self._contexts(target)
        if not pids:
            raise CannotSuspend("none of the engine's processes holds a CUDA context that can be seen from here")
        used = self._gauge.used(target)
        if used == 0:
            raise CannotSuspend(UNPROVABLE)
        room = available_bytes() + memory.swap_space().free
        if used > room:
            raise CannotSuspend(
                f"{used >> 20} MiB of its device do not fit the {room >> 20} MiB of host memory and swap that are free"
            )
        try:
            host = memory.footprint(target.pids).pss
            for pid in pids:
                driver.lock(pid, _LOCK_TIMEOUT_MS)
            for pid in pids:
                driver.checkpoint(pid)
            if self._groups.available:
                self._groups.freeze(target.instance_id)
            left = self._gauge.used(target)
            if used - left < _LEAST_FREED * used:
                raise EngineFailed(f"checkpointed, and {left >> 20} of {used >> 20} MiB are still in use on the device")
            return Taken(used, left, max(used - left, memory.footprint(target.pids).pss - host))
        except (EngineFailed, PermissionDenied, OSError) as e:
            self._undo(driver, target, pids)
            raise CannotSuspend(e.message if isinstance(e, EngineFailed | PermissionDenied) else str(e)) from e

    async def resume(self, target: Target) -> None:
        try:
            await asyncio.to_thread(self._resume, target)
        except EngineFailed as e:
            raise RestoreFailed(e.message) from e
        except OSError as e:
            raise RestoreFailed(f"the engine's control group cannot be thawed: {e}") from e

    def cannot_spill(self) -> str:
        """Why snapshots cannot be written to swap here; empty if they can."""
        if memory.swap_space().total == 0:
            return "this machine has no swap (`thaw doctor --fix` sets some up)"
        if not self._groups.available:
            return f"engines cannot be frozen: {self._groups.reason}"
        lacking = [n for c, n in _FOR_SPILLING.items() if not memory.has_capability(c)]
        return f"the nodeagent lacks {' and '.join(lacking)}" if lacking else ""

    async def spill(self, target: Target) -> int:
        """Write the snapshot of a suspended engine, which is memory of its frozen processes, to swap; the bytes of host memory that came free.
        Raises `CannotSuspend`; its snapshot is then where it was."""
        return await asyncio.to_thread(self._spill, target)

    def _spill(self, target: Target) -> int:
        try:
            if why := self.cannot_spill():
                raise EngineFailed(why)
            before = memory.footprint(target.pids)
            if before.pss > memory.swap_space().free:
                raise EngineFailed(f"{before.pss >> 20} MiB do not fit the swap that is free")
            after = memory.page_out(target.pids, before.pss + before.swap)
        except (EngineFailed, PermissionDenied, OSError) as e:
            raise CannotSuspend(e.message if isinstance(e, EngineFailed | PermissionDenied) else str(e)) from e
        freed = before.pss - after.pss
        if freed < _LEAST_FREED * before.pss:
            raise CannotSuspend(f"only {max(0, freed) >> 20} of {before.pss >> 20} MiB went to swap: the rest is locked or shared")
        self._spilled.add(target.instance_id)
        return freed

    def _resume(self, target: Target) -> None:
        driver = self._there()
        if target.instance_id in self._spilled:
            self._spilled.discard(target.instance_id)
            with contextlib.suppress(EngineFailed, PermissionDenied, OSError):  # the driver's own reads bring it back as well
                memory.page_in(target.pids)
        self._groups.thaw(target.instance_id)
        states = {pid: driver.state(pid) for pid in target.pids}
        for pid, state in states.items():
            if state in (State.FAILED, State.CHECKPOINTING, State.RESTORING):
                raise EngineFailed(f"the driver gives up on pid {pid}: its state is {state.name.lower()}")
        for pid, state in states.items():
            if state is State.CHECKPOINTED:
                driver.restore(pid)
        for pid in states:
            if driver.state(pid) is State.LOCKED:
                driver.unlock(pid)

    def _contexts(self, target: Target) -> list[int]:
        """NVML's compute processes among the engine's. In a pid namespace of its own NVML's pids match none: then those that the driver
        knows."""
        driver = self._there()
        seen = sorted(self._gauge.by_process(target.device_ids, target.pids))
        return seen or [pid for pid in target.pids if driver.state(pid) is not None]

    def _undo(self, driver: CheckpointDriver, target: Target, pids: list[int]) -> None:
        with contextlib.suppress(OSError):
            self._groups.thaw(target.instance_id)
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

    def learn(self, snapshot_bytes: int, took_s: float) -> None:
        self._rates = self._rates.resumed(snapshot_bytes, took_s)

    def _there(self) -> CheckpointDriver:
        if self._driver is None:
            raise EngineFailed(self._reason)
        return self._driver


def _several_devices(target: Target) -> str:
    """NCCL between devices uses peer-to-peer and shared memory, which cannot be checkpointed."""
    if len(target.device_ids) < 2 or all(target.environment.get(k) == v for k, v in _SINGLE_PROCESS_NCCL.items()):
        return ""
    needed = ", ".join(f"{k}={v}" for k, v in _SINGLE_PROCESS_NCCL.items())
    said = f"it has {len(target.device_ids)} devices, and NCCL's links between them cannot be checkpointed: set {needed} in its env"
    own = ", and disable_custom_all_reduce: true in its engine_args" if target.engine in _OWN_LINKS else ""
    return said + own
