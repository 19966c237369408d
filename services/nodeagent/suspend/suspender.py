"""Suspends and resumes instances, and verifies the result."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeVar

from services.nodeagent.domain.state import Instance, Outlook
from services.nodeagent.domain.suspend_choice import choose
from services.nodeagent.domain.suspending import IN_HOST_MEMORY
from services.nodeagent.suspend import shared_memory
from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import Spilling, SuspendMethod, SuspendResult, Target
from shared.contracts import subjects
from shared.contracts.base import Message, Request
from shared.contracts.engine import EngineAsleep, EngineProbed, SleepEngine, WakeEngine
from shared.contracts.node import Capability, SuspendWay
from shared.errors import (
    CannotSuspend,
    DeadlineExceeded,
    DeviceFailed,
    EngineFailed,
    PermissionDenied,
    RestoreFailed,
    ThawError,
    Unreachable,
)
from shared.processes import end_marked, find_marked, mark_of

R = TypeVar("R", bound=Message)
Ask = Callable[[str, Request, type[R]], Awaitable[R]]
log = logging.getLogger(__name__)
_HOLD_DEADLINE_MS = 3_000
_ASK_AGAIN_S = 0.02
_KEPT = 0.7
"""Share of an engine's memory that must be present after a resume: less means lost pages."""
_PATIENCE = 3.0
"""Deadline of a resume, in multiples of its expected duration."""
_TRIED_AGAIN_S = 600.0
"""After a failure with a model, a method is avoided for this long if there is another one."""
_ENDED_WITHIN_S = 5.0
_REMOVED_WITHIN_S = 1.0
_POLL_S = 0.01
_SEPARATE = "its device has memory of its own, where the weights of a stopped instance stay for its next start"
_STAGES = "it runs in stages, which are not suspended yet"
_SHARED = "it shares its process: it is detached, its weights stay with the loader, and its next start attaches it again"


class Suspender:
    """Suspends and resumes instances."""

    def __init__(
        self,
        ways: Mapping[SuspendWay, SuspendMethod],
        cgroups: Cgroups,
        memory_usage: MemoryUsage,
        ask: Ask[Message],
        wake_within_s: float,
        separate: Collection[str] = (),
    ) -> None:
        """Create a suspender.

        Args:
            ways: Ways to suspend; `choose` picks one by its measured cost.
            cgroups: The engines' control groups.
            memory_usage: Reads the memory that engines use.
            ask: `Mesh.request`.
            wake_within_s: Seconds that a sleeping engine may take to wake, at least.
            separate: Devices with memory of their own. Their instances are stopped rather than
                suspended: the weights would stay mapped, and a stopped one finds them again.
        """
        self._ways = ways
        self.cgroups = cgroups
        self._memory_usage = memory_usage
        self._ask = ask
        self._wake_within_s = wake_within_s
        self._separate = frozenset(separate)
        self._frozen: dict[str, Target] = {}
        self._failed: dict[tuple[str, SuspendWay], float] = {}

    def capabilities(self) -> tuple[Capability, ...]:
        """The node's suspend capabilities. Blocking."""
        found = []
        for name, way in self._ways.items():
            why = way.explain_unavailable()
            found.append(Capability(name=f"suspend:{name}", available=not why, reason=why))
        return tuple(found)

    def target(self, instance: Instance) -> Target:
        """The engine with all its processes, which are moved into its control group.

        Those of a container stay in the group of their container engine, where that has limits.
        Blocking.
        """
        spec = instance.command.card.spec
        hosted = spec.engine != "builtin"
        pids: tuple[int, ...] = ()
        if instance.pid is not None:
            pids = self.cgroups.gather(
                instance.instance_id,
                instance.pid,
                include_host=not hosted,
                others=instance.engine_pids,
                in_container=spec.container is not None,
            )
        return Target(
            instance_id=instance.instance_id,
            engine=spec.engine,
            device_ids=instance.command.device_ids,
            pids=pids,
            hosted=hosted,
            sleep_levels=instance.sleep_levels,
            environment=spec.env,
            moved_from=instance.suspend_state.moved_from,
            in_container=spec.container is not None,
        )

    def is_frozen(self, instance: Instance) -> bool:
        """True if a suspended instance's processes are as their suspension left them."""
        can_freeze = self.cgroups.available
        if can_freeze and instance.command.card.spec.container is not None:
            self.cgroups.find_container(instance.instance_id, instance.engine_pids)
            can_freeze = not self.cgroups.list_outside(instance.instance_id, instance.engine_pids)
        if not can_freeze:  # the driver keeps checkpointed processes until it restores them
            return instance.suspend_state.outlook.way in IN_HOST_MEMORY
        return self.cgroups.is_frozen(instance.instance_id)

    async def assess(self, instance: Instance) -> tuple[Outlook, int]:
        """The outlook of a suspension, and the memory that the engine holds."""
        return await asyncio.to_thread(self._assess, instance)

    def _assess(self, instance: Instance) -> tuple[Outlook, int]:
        if instance.is_shared:
            return Outlook(reason=_SHARED), 0
        if instance.command.card.stages:
            return Outlook(reason=_STAGES), 0
        target = self.target(instance)
        try:
            used = self._memory_usage.used_bytes_with_swap(target)
            return choose(self._outlooks(instance, target)), used
        except (PermissionDenied, DeviceFailed) as e:
            return Outlook(reason=e.message), 0

    def _outlooks(self, instance: Instance, target: Target) -> list[Outlook]:
        """The outlooks of all methods.

        Those that failed recently with this model are left out if another one is possible.
        """
        if not self._separate.isdisjoint(target.device_ids):
            return [Outlook(reason=_SEPARATE)]
        found = [way.outlook(target) for way in self._ways.values()]
        since = time.monotonic() - _TRIED_AGAIN_S
        model = instance.command.card.name
        others = [o for o in found if o.way is not None and self._failed.get((model, o.way), since) <= since]
        return others or found

    async def hold(self, instance_id: str) -> None:
        """Pause the engine: it refuses new requests.

        Raises `InstanceBusy` if it serves any.
        """
        request = SleepEngine(level=0, deadline_ms=_HOLD_DEADLINE_MS)
        await self._ask(subjects.engine_control(instance_id), request, EngineAsleep)

    async def suspend(self, instance: Instance, name: SuspendWay) -> SuspendResult:
        """Suspend a paused engine.

        Raises `CannotSuspend` or `DeviceFailed`; the engine then runs, still paused.
        """
        target = await asyncio.to_thread(self.target, instance)
        if not target.pids:
            raise CannotSuspend("None of the engine's processes can be found")
        tried = (instance.command.card.name, name)
        if name not in self._ways:
            raise CannotSuspend(_no_way(name))
        try:
            taken = await self._ways[name].suspend(target)
        except (CannotSuspend, DeviceFailed):
            self._failed[tried] = time.monotonic()
            raise
        self._failed.pop(tried, None)
        self._frozen[instance.instance_id] = target
        return taken

    def can_spill(self) -> bool:
        """True if snapshots in host memory can be written to swap. Blocking."""
        return any(
            isinstance(way, Spilling) and not way.explain_unavailable() and not way.explain_spill_unavailable()
            for way in self._ways.values()
        )

    async def spill(self, instance: Instance, name: SuspendWay) -> int:
        """Write a snapshot to swap, and return the freed bytes of host memory.

        Raises `CannotSuspend`.
        """
        if name not in self._ways:
            raise CannotSuspend(_no_way(name))
        way, target = self._ways[name], self._frozen.get(instance.instance_id)
        if not isinstance(way, Spilling):
            raise CannotSuspend(f"A suspension by {name} has no snapshot that can be written to swap")
        return await way.spill(target if target is not None else await asyncio.to_thread(self.target, instance))

    async def resume(self, instance: Instance, name: SuspendWay | None) -> int:
        """Resume an engine and verify its health, tokens and memory.

        Args:
            instance: The instance.
            name: The method by which it is suspended; None: it is only paused.

        Returns:
            Bytes that it holds.

        Raises:
            RestoreFailed: The engine did not resume as it was.
        """
        begun = asyncio.get_running_loop().time()
        # A frozen engine forks nothing: its processes are those that were suspended.
        known = self._frozen.pop(instance.instance_id, None)
        target = known if known is not None else await asyncio.to_thread(self.target, instance)
        if name is not None:
            await self._resume_by(name, target)
        else:
            self.cgroups.thaw(instance.instance_id)  # in no thread, which would run after a cancellation
        if name == "cpu":
            # Its memory exists in memory or swap whatever the engine does. Other methods restore
            # memory while the engine wakes.
            probed, used = await asyncio.gather(self._wake(instance), asyncio.to_thread(self._prove, instance, target))
        else:
            probed = await self._wake(instance)
            # Listed again: waking may have created processes, as Ollama does for each load.
            used = await asyncio.to_thread(lambda: self._prove(instance, self.target(instance)))
        if not probed.same:
            raise RestoreFailed("The engine's output differs from its output before the suspension")
        if name is not None:
            self._ways[name].learn(instance.suspend_state.snapshot_bytes, asyncio.get_running_loop().time() - begun)
        return used

    async def hand_over(self, template: Instance, instance: Instance) -> None:
        """Thaw a suspended engine, and move its processes to the control group of `instance`.

        An engine that sleeps by its own means still sleeps.

        Raises:
            RestoreFailed: The engine cannot be thawed.
        """
        known = self._frozen.pop(template.instance_id, None)
        target = known if known is not None else await asyncio.to_thread(self.target, template)
        way = template.suspend_state.outlook.way
        if way is not None:
            await self._resume_by(way, target)
        await asyncio.to_thread(self._move, template.instance_id, instance.instance_id, target.pids)
        for method in self._ways.values():
            method.rename(template.instance_id, instance.instance_id)

    async def _resume_by(self, name: SuspendWay, target: Target) -> None:
        """Raises `RestoreFailed`, also for a method that only an earlier nodeagent had."""
        if name not in self._ways:
            raise RestoreFailed(_no_way(name))
        await self._ways[name].resume(target)

    def _move(self, old: str, new: str, pids: tuple[int, ...]) -> None:
        for pid in sorted({*pids, *self.cgroups.pids(old)}):
            self.cgroups.add(new, pid)
        self.cgroups.remove(old)

    async def _wake(self, instance: Instance) -> EngineProbed:
        """Wake the engine, retrying while it is unreachable.

        It may have lost NATS and be reconnecting.
        """
        subject = subjects.engine_control(instance.instance_id)
        # Reading weights again takes time proportional to their size.
        within_s = max(self._wake_within_s, _PATIENCE * instance.suspend_state.outlook.resume_s)
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            left = deadline - asyncio.get_running_loop().time()
            try:
                answer = await self._ask(subject, WakeEngine(deadline_ms=max(1, int(left * 1e3))), EngineProbed)
            except Unreachable as e:
                if asyncio.get_running_loop().time() + _ASK_AGAIN_S >= deadline:
                    raise RestoreFailed(f"The engine cannot be reached: {e.message}") from e
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            except DeadlineExceeded as e:
                raise RestoreFailed(f"The engine did not answer within {within_s:g} s") from e
            except ThawError as e:
                raise RestoreFailed(e.message) from e
            assert isinstance(answer, EngineProbed)
            return answer

    def _prove(self, instance: Instance, target: Target) -> int:
        """Verify that the engine's memory is present again. Blocking.

        It is on its device, or on cpu in memory or swap. An engine that was only paused has kept
        its memory: if that cannot be read, its last measurement counts.
        """
        suspend_state = instance.suspend_state
        try:
            there = self._memory_usage.used_bytes_with_swap(target)
        except (PermissionDenied, DeviceFailed) as e:
            if not suspend_state.freezing:
                log.warning("failed to measure an engine", extra={"instance": instance.instance_id, "error": e.message})
                return suspend_state.used_bytes
            raise RestoreFailed(e.message) from e
        # On cpu a second suspension frees only memory touched since the first: the rest is still in
        # swap.
        moved = suspend_state.snapshot_bytes if suspend_state.outlook.way == "cpu" else suspend_state.frees_bytes
        before = suspend_state.left_bytes + moved
        if suspend_state.freezing and there < _KEPT * before:
            raise RestoreFailed(f"{there >> 20} of the {before >> 20} MiB that the engine held are present again")
        return there

    def group_for(self, instance: Instance) -> str | None:
        """The cgroup.procs file that a hosted engine joins, if there are groups.

        Blocking.
        """
        if instance.command.card.spec.engine == "builtin":
            return None
        made = self.cgroups.create(instance.instance_id)
        return str(made) if made is not None else None

    def on_started(self, instance: Instance, pid: int) -> None:
        """Register the instance's process.

        A host stays outside its engine's group, because it keeps answering. Blocking.
        """
        if instance.command.card.spec.engine == "builtin" and not instance.is_shared:
            self.cgroups.add(instance.instance_id, pid)

    def kill(self, instance: Instance) -> None:
        """Kill the engine's processes, frozen or not. Blocking."""
        self.cgroups.kill(instance.instance_id)

    async def on_ended(self, instance_id: str, *, is_hosted: bool = True) -> None:
        """Clean up after an exit: remaining processes and the control group.

        Args:
            instance_id: The instance.
            is_hosted: A host may have started processes that its control group does not show. To
                find them costs some milliseconds of CPU time.

        Raises:
            EngineFailed: A process cannot be ended, and may still use memory.
        """
        self._frozen.pop(instance_id, None)
        for way in self._ways.values():
            way.forget(instance_id)
        deadline = asyncio.get_running_loop().time() + _ENDED_WITHIN_S
        while self.cgroups.pids(instance_id):
            self.cgroups.kill(instance_id)
            if asyncio.get_running_loop().time() > deadline:
                raise _not_ended(instance_id, self.cgroups.pids(instance_id))
            await asyncio.sleep(_POLL_S)
        # The kernel is still removing exited processes: until then the group is in use.
        deadline = asyncio.get_running_loop().time() + _REMOVED_WITHIN_S
        while not self.cgroups.remove(instance_id) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110  # there is no event
            await asyncio.sleep(_POLL_S)
        if is_hosted:
            # Where there are no cgroups, a hosted engine's processes are known by their mark.
            mark = mark_of(self.cgroups.scope, instance_id)
            if not await asyncio.to_thread(end_marked, mark):
                raise _not_ended(instance_id, find_marked(mark))
        if left := self.cgroups.left_segments(instance_id):
            await asyncio.to_thread(shared_memory.remove, left)

    async def reap_strays(self, known: frozenset[str]) -> None:
        """End engines of an earlier agent that have no record."""
        for instance_id in list(self.cgroups.known()):
            if instance_id not in known:
                if pids := self.cgroups.pids(instance_id):
                    log.warning("ending orphaned engine processes", extra={"instance": instance_id, "pids": pids})
                with contextlib.suppress(EngineFailed):
                    await self.on_ended(instance_id)


def _no_way(name: SuspendWay) -> str:
    return f"This nodeagent does not suspend by {name}, as an earlier one did: its THAW_SUSPEND or THAW_DEVICES differ"


def _not_ended(instance_id: str, pids: Collection[int]) -> EngineFailed:
    named = ", ".join(map(str, sorted(pids)))
    log.error("failed to end an engine's processes", extra={"instance": instance_id, "pids": named})
    return EngineFailed(f"Processes {named} of {instance_id} could not be ended. They may hang in a driver (`dmesg`)")
