"""Suspends engines on cpu: freeze them, and page them out to swap.

A resume thaws them; pages return on access.

A page that another process maps too (a zygote's imports, shared weights) stays in memory. Success
is judged by PSS, read while the engine is frozen.
"""

from __future__ import annotations

import asyncio
import logging
import time

from services.nodeagent.domain.state import Outlook
from services.nodeagent.suspend import memory
from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.estimates import SuspendEstimates
from services.nodeagent.suspend.port import SuspendResult, Target
from shared.contracts.node import SuspendWay
from shared.errors import CannotSuspend, EngineFailed, PermissionDenied, RestoreFailed

log = logging.getLogger(__name__)
_MOST_LEFT = 0.9
"""An engine that keeps more than this share of its memory is not worth suspending."""
_SWAP_MARGIN = 1.05
_Touched = dict[int, list[tuple[int, int]]]
"""(address, bytes) of resident memory, by process; empty until its second suspension."""


class PageOut:
    """Pages engines out to swap."""

    name: SuspendWay = "cpu"

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups
        self._estimates = SuspendEstimates(left=0.25, resume_bytes_per_s=4e9, least_resume_s=0.05)
        self._touched: dict[str, _Touched] = {}
        self._prefetching: set[asyncio.Task[None]] = set()

    def explain_unavailable(self) -> str:
        missing = []
        if memory.swap_space().total == 0:
            missing.append("this machine has no swap (`thaw doctor --fix` sets it up)")
        if not self._cgroups.available:
            missing.append(f"engines cannot be frozen: {self._cgroups.reason}")
        if not memory.has_capability(memory.CAP_SYS_NICE):
            missing.append("the nodeagent lacks CAP_SYS_NICE")
        if not memory.has_capability(memory.CAP_SYS_PTRACE):
            missing.append("the nodeagent lacks CAP_SYS_PTRACE")
        return "; ".join(missing)

    def outlook(self, target: Target) -> Outlook:
        why = self.explain_unavailable() or ("it runs on a GPU" if target.on_cuda else "") or self._explain_unfreezable(target)
        if why:
            return Outlook(reason=why)
        now = memory.footprint(target.pids)
        free = memory.swap_space().free
        if now.pss * _SWAP_MARGIN > free:
            return Outlook(reason=f"{now.pss >> 20} MiB do not fit the {free >> 20} MiB of free swap")
        moved = int(now.pss * (1 - self._estimates.left)) + now.swap
        return Outlook(
            way="cpu", left_bytes=now.pss - (moved - now.swap), snapshot_bytes=moved, resume_s=self._estimates.resume_s(moved)
        )

    def _explain_unfreezable(self, target: Target) -> str:
        left_out = self._cgroups.list_outside(target.instance_id, target.pids)
        if not left_out:
            return ""
        if target.in_container:
            return "the control group of its container belongs to another user, has other processes, or is not visible here"
        return f"its processes ({', '.join(map(str, left_out))}) cannot be moved into a control group by this user"

    async def suspend(self, target: Target) -> SuspendResult:
        taken = await asyncio.to_thread(self._suspend, target)
        self._estimates = self._estimates.learn_suspended(taken.used_bytes, taken.left_bytes)
        return taken

    def _suspend(self, target: Target) -> SuspendResult:
        begun = time.monotonic()
        try:
            if why := self._explain_unfreezable(target):
                raise EngineFailed(why)
            before = memory.footprint(target.pids)
            self._cgroups.freeze(target.instance_id)
            pids = tuple(sorted({*target.pids, *self._cgroups.pids(target.instance_id)}))
            # The working set of a process is unknown the first time: everything is resident because
            # it was just created.
            known = self._touched.get(target.instance_id, {}).keys()
            resident = _find_resident(tuple(pid for pid in pids if pid in known))
            self._touched[target.instance_id] = {pid: resident.get(pid, []) for pid in pids}
            after = memory.page_out(pids, before.pss + before.swap)
        except (PermissionDenied, EngineFailed, OSError) as e:
            self._cgroups.thaw(target.instance_id)
            raise CannotSuspend(e.message if isinstance(e, PermissionDenied | EngineFailed) else str(e)) from e
        # Memory untouched since the last resume is still in swap: it counts as moved.
        whole = before.pss + before.swap
        if after.pss > _MOST_LEFT * whole:
            self._cgroups.thaw(target.instance_id)
            raise CannotSuspend(
                f"Only {max(0, whole - after.pss) >> 20} of {whole >> 20} MiB were freed: the rest is mapped by other processes too, "
                "locked, or did not fit swap"
            )
        log.info(
            "paged out",
            extra={"instance": target.instance_id, "before": before.pss, "after": after.pss, "took_s": time.monotonic() - begun},
        )
        return SuspendResult(before.pss, after.pss, after.swap)

    async def resume(self, target: Target) -> None:
        """Thaw the engine and prefetch the memory that it touched since its last resume.

        All processes are prefetched in parallel; page faults would read one piece after the other.
        """
        touched = self._touched.get(target.instance_id, {})
        for pid, ranges in ((pid, ranges) for pid, ranges in touched.items() if ranges):
            task = asyncio.create_task(asyncio.to_thread(_prefetch, pid, ranges), name=f"prefetch {target.instance_id}")
            self._prefetching.add(task)
            task.add_done_callback(self._prefetching.discard)
        try:
            await asyncio.to_thread(self._cgroups.thaw, target.instance_id)
        except OSError as e:
            raise RestoreFailed(f"The engine's control group cannot be thawed: {e}") from e

    async def wait_for_prefetches(self) -> None:
        """Wait until all prefetches have finished."""
        await asyncio.gather(*self._prefetching)

    def forget(self, instance_id: str) -> None:
        self._touched.pop(instance_id, None)

    def rename(self, old: str, new: str) -> None:
        if old in self._touched:
            self._touched[new] = self._touched.pop(old)

    def learn(self, snapshot_bytes: int, took_s: float) -> None:
        """Record the duration of a resume up to the engine's first answer."""
        self._estimates = self._estimates.learn_resumed(snapshot_bytes, took_s)


def _find_resident(pids: tuple[int, ...]) -> _Touched:
    found = {}
    for pid in pids:
        try:
            found[pid] = memory.find_resident(pid)
        except (PermissionDenied, OSError) as e:
            log.debug("failed to read a process's page table", extra={"pid": pid, "error": str(e)})
    return found


def _prefetch(pid: int, ranges: list[tuple[int, int]]) -> None:
    try:
        memory.advise(pid, ranges, memory.MADV_WILLNEED)
    except (PermissionDenied, EngineFailed, OSError) as e:
        log.debug("failed to prefetch", extra={"pid": pid, "error": str(e)})
