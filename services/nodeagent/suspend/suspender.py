"""Suspends and resumes instances: asks their engines, has the chosen way do its work, and looks at what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from services.nodeagent.domain.state import Instance, Outlook
from services.nodeagent.domain.suspend_choice import choose
from services.nodeagent.suspend import shared_memory
from services.nodeagent.suspend.cgroups import Groups
from services.nodeagent.suspend.memory_usage import Gauge
from services.nodeagent.suspend.port import Spilling, Taken, Target, Way
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
from shared.processes import end_marked, mark_of, marked

R = TypeVar("R", bound=Message)
Ask = Callable[[str, Request, type[R]], Awaitable[R]]
log = logging.getLogger(__name__)
_HOLD_DEADLINE_MS = 3_000
_ASK_AGAIN_S = 0.02
_KEPT = 0.7
"""At least this part of what an engine used must be there again: less means that pages were lost."""
_PATIENCE = 3.0
"""Times the expected length of a resumption."""
_TRIED_AGAIN_S = 600.0
"""A way that a model could not be suspended by is left so long, where there is another one."""
_ENDED_WITHIN_S = 5.0
_REMOVED_WITHIN_S = 1.0
_POLL_S = 0.01


class Keeper:
    """`ask` is `Mesh.request`. `ways` are tried in the order that `choose` finds by what they were measured to cost."""

    def __init__(
        self, ways: Mapping[SuspendWay, Way], groups: Groups, gauge: Gauge, ask: Ask[Message], wake_within_s: float
    ) -> None:
        self._ways = ways
        self.groups = groups
        self._gauge = gauge
        self._ask = ask
        self._wake_within_s = wake_within_s
        self._frozen: dict[str, Target] = {}
        self._failed: dict[tuple[str, SuspendWay], float] = {}

    def capabilities(self) -> tuple[Capability, ...]:
        """Blocking."""
        found = []
        for name, way in self._ways.items():
            why = way.unavailable()
            found.append(Capability(name=f"suspend:{name}", available=not why, reason=why))
        return tuple(found)

    def target(self, instance: Instance) -> Target:
        """The engine with all its processes, brought together in its control group. Blocking."""
        spec = instance.command.card.spec
        hosted = spec.engine != "builtin"
        pids: tuple[int, ...] = ()
        if instance.pid is not None:
            pids = self.groups.gather(instance.instance_id, instance.pid, include_host=not hosted, others=instance.engine_pids)
        return Target(
            instance_id=instance.instance_id,
            engine=spec.engine,
            device_ids=instance.command.device_ids,
            pids=pids,
            hosted=hosted,
            sleep_levels=instance.sleep_levels,
            environment=spec.env,
        )

    async def assess(self, instance: Instance) -> tuple[Outlook, int]:
        """What a suspension would do, and what the engine holds now."""
        return await asyncio.to_thread(self._assess, instance)

    def _assess(self, instance: Instance) -> tuple[Outlook, int]:
        target = self.target(instance)
        try:
            used = self._gauge.held(target)
            return choose(self._outlooks(instance, target)), used
        except (PermissionDenied, DeviceFailed) as e:
            return Outlook(reason=e.message), 0

    def _outlooks(self, instance: Instance, target: Target) -> list[Outlook]:
        """Of all ways; those that failed lately with this model are left out if another one is possible."""
        found = [way.outlook(target) for way in self._ways.values()]
        since = time.monotonic() - _TRIED_AGAIN_S
        model = instance.command.card.name
        others = [o for o in found if o.way is not None and self._failed.get((model, o.way), since) <= since]
        return others or found

    async def hold(self, instance_id: str) -> None:
        """Have the engine refuse new requests. Raises `InstanceBusy` if it serves any."""
        request = SleepEngine(level=0, deadline_ms=_HOLD_DEADLINE_MS)
        await self._ask(subjects.engine_control(instance_id), request, EngineAsleep)

    async def suspend(self, instance: Instance, name: SuspendWay) -> Taken:
        """Raises `CannotSuspend` or `DeviceFailed`; the engine then runs, and refuses requests still."""
        target = await asyncio.to_thread(self.target, instance)
        if not target.pids:
            raise CannotSuspend("none of the engine's processes can be found")
        tried = (instance.command.card.name, name)
        try:
            taken = await self._ways[name].suspend(target)
        except (CannotSuspend, DeviceFailed):
            self._failed[tried] = time.monotonic()
            raise
        self._failed.pop(tried, None)
        self._frozen[instance.instance_id] = target
        return taken

    def can_spill(self) -> bool:
        """Whether snapshots in host memory can be written to swap here. Blocking."""
        return any(isinstance(way, Spilling) and not way.unavailable() and not way.cannot_spill() for way in self._ways.values())

    async def spill(self, instance: Instance, name: SuspendWay) -> int:
        """Bytes of host memory that came free. Raises `CannotSuspend`."""
        way, target = self._ways[name], self._frozen.get(instance.instance_id)
        if not isinstance(way, Spilling):
            raise CannotSuspend(f"what is suspended by way of {name} has nothing to be written to swap")
        return await way.spill(target if target is not None else await asyncio.to_thread(self.target, instance))

    async def resume(self, instance: Instance, name: SuspendWay | None) -> int:
        """Bring it back and look at it: its health, its tokens, its bytes; the bytes that it holds. Raises `RestoreFailed`."""
        begun = asyncio.get_running_loop().time()
        # What is frozen forks nothing: its processes are those that it was suspended with.
        known = self._frozen.pop(instance.instance_id, None)
        target = known if known is not None else await asyncio.to_thread(self.target, instance)
        if name is not None:
            await self._ways[name].resume(target)
        else:
            await asyncio.to_thread(self.groups.thaw, instance.instance_id)
        if name == "cpu":
            # In memory or in swap, it is there whatever its engine does meanwhile. Other ways bring it back as the engine wakes.
            probed, used = await asyncio.gather(self._wake(instance), asyncio.to_thread(self._prove, instance, target))
        else:
            probed = await self._wake(instance)
            # Looked for anew: waking may have made some, as Ollama does for each load of a model.
            used = await asyncio.to_thread(lambda: self._prove(instance, self.target(instance)))
        if not probed.same:
            raise RestoreFailed("the engine answers otherwise than before it was suspended")
        if name is not None:
            self._ways[name].learn(instance.parking.snapshot_bytes, asyncio.get_running_loop().time() - begun)
        return used

    async def _wake(self, instance: Instance) -> EngineProbed:
        """Asked again while it cannot be reached: it may have lost NATS meanwhile, and connects anew."""
        subject = subjects.engine_control(instance.instance_id)
        # Weights that are read again take as long as they are large.
        within_s = max(self._wake_within_s, _PATIENCE * instance.parking.outlook.resume_s)
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            left = deadline - asyncio.get_running_loop().time()
            try:
                answer = await self._ask(subject, WakeEngine(deadline_ms=max(1, int(left * 1e3))), EngineProbed)
            except Unreachable as e:
                if asyncio.get_running_loop().time() + _ASK_AGAIN_S >= deadline:
                    raise RestoreFailed(f"the engine cannot be reached: {e.message}") from e
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            except DeadlineExceeded as e:
                raise RestoreFailed(f"the engine did not answer within {within_s:g} s") from e
            except ThawError as e:
                raise RestoreFailed(e.message) from e
            assert isinstance(answer, EngineProbed)
            return answer

    def _prove(self, instance: Instance, target: Target) -> int:
        """Blocking. What it held before it was suspended is there again: on its device, or on cpu in memory or swap."""
        parking = instance.parking
        try:
            there = self._gauge.held(target)
        except (PermissionDenied, DeviceFailed) as e:
            raise RestoreFailed(e.message) from e
        # On cpu a second suspension frees no more than was touched since the first: the rest lay in swap all along.
        moved = parking.snapshot_bytes if parking.outlook.way == "cpu" else parking.frees_bytes
        before = parking.left_bytes + moved
        if parking.freezing and there < _KEPT * before:
            raise RestoreFailed(f"{there >> 20} of the {before >> 20} MiB that the engine held are there again")
        return there

    def group_for(self, instance: Instance) -> str | None:
        """The file that a hosted engine's processes write themselves into, where there are groups. Blocking."""
        if instance.command.card.spec.engine == "builtin":
            return None
        made = self.groups.create(instance.instance_id)
        return str(made) if made is not None else None

    def started(self, instance: Instance, pid: int) -> None:
        """Its process was made. A host stays outside of its engine's group: it goes on answering. Blocking."""
        if instance.command.card.spec.engine == "builtin":
            self.groups.add(instance.instance_id, pid)

    def kill(self, instance: Instance) -> None:
        """End the engine's processes, frozen or not. Blocking."""
        self.groups.kill(instance.instance_id)

    async def ended(self, instance_id: str) -> None:
        """The instance's own process is gone: whatever it left behind goes too, and its group with it."""
        self._frozen.pop(instance_id, None)
        for way in self._ways.values():
            way.forget(instance_id)
        deadline = asyncio.get_running_loop().time() + _ENDED_WITHIN_S
        while self.groups.pids(instance_id):
            self.groups.kill(instance_id)
            if asyncio.get_running_loop().time() > deadline:
                log.error(
                    "processes of an engine cannot be ended", extra={"instance": instance_id, "pids": self.groups.pids(instance_id)}
                )
                return
            await asyncio.sleep(_POLL_S)
        # The kernel is not done yet with what has just ended: until then its group is in use.
        deadline = asyncio.get_running_loop().time() + _REMOVED_WITHIN_S
        while not self.groups.remove(instance_id) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(_POLL_S)
        # Where there are no groups, a hosted engine's processes are known by their mark.
        mark = mark_of(self.groups.scope, instance_id)
        if not await asyncio.to_thread(end_marked, mark):
            log.error("processes of an engine cannot be ended", extra={"instance": instance_id, "pids": marked(mark)})
        await asyncio.to_thread(shared_memory.remove, self.groups.left_segments(instance_id))

    async def reap_strays(self, known: frozenset[str]) -> None:
        """End engines that an earlier agent left behind and nobody knows any more."""
        for instance_id in list(self.groups.known()):
            if instance_id not in known:
                if pids := self.groups.pids(instance_id):
                    log.warning("orphaned engine processes are ended", extra={"instance": instance_id, "pids": pids})
                with contextlib.suppress(EngineFailed):
                    await self.ended(instance_id)
