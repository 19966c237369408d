"""The host of a rank behind the first one: its engine computes for the group, and has no port.

It ends with its group: when the first rank's host has stopped or ended, and when its own engine has
(ADR 0090).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from services.enginehost.drivers.port import Rank
from services.enginehost.engine import Engine
from services.enginehost.ranks.head import own_address
from services.enginehost.ranks.member import RankMember, join
from services.enginehost.settings import HostSettings
from shared.contracts.base import Done, Message
from shared.contracts.engine import EngineControl, EngineStart, ProbeEngine, SleepEngine, WakeEngine
from shared.contracts.migration import PrepareResume
from shared.engines.instance_process import InstanceProcess
from shared.engines.later_stage import NOT_FIRST, NoMigration, NoRequests
from shared.errors import CannotSuspend, InstanceDraining, ThawError
from shared.messaging import Mesh
from shared.telemetry.timeline import Timeline

_CAUSE_WITHIN_S = 1.0
"""An engine often ends because the first rank's did, and may be seen to end before it."""


class LaterRank(InstanceProcess):
    """The host of one later rank."""

    _serving: NoRequests

    def __init__(self, settings: HostSettings, start: EngineStart, stop: asyncio.Event, timeline: Timeline) -> None:
        mesh = Mesh(settings, f"enginehost-{start.instance_id}")
        self._serving = NoRequests(mesh)
        super().__init__(start, stop, timeline, mesh, self._serving, NoMigration())
        self._settings = settings
        self._engine = Engine(settings, start, timeline, self._reporter)
        self._member: RankMember | None = None

    def _background(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"processes": self._engine.refresh_pids_forever()}

    async def _start_engine(self) -> None:
        stage = self._start.stage
        assert stage is not None
        member = self._member = await join(self._mesh, stage)
        address = own_address(self._settings.stage_host)
        self._engine.rank = Rank(stage.index, stage.count, member.host, member.port, address)
        starting = asyncio.create_task(self._engine.start_later_rank(member.ready), name="engine")
        closing = asyncio.create_task(member.closed.wait(), name="closing")
        try:
            causes: set[asyncio.Future[Any]] = {closing, member.lost}
            await asyncio.wait({starting, *causes}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and starting.exception() is not None:
                await asyncio.wait(causes, timeout=_CAUSE_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await self._stop_with_group()
            if member.lost.done():
                raise member.lost.result()
            starting.result()
        finally:
            starting.cancel()
            closing.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    async def _wait_for_failure(self) -> ThawError:
        """Wait until the engine or the group ends. The process stops with a group that stops."""
        assert self._member is not None
        failing = asyncio.create_task(self._engine.failure(), name="failure")
        closing = asyncio.create_task(self._member.closed.wait(), name="closing")
        try:
            causes: set[asyncio.Future[Any]] = {closing, self._member.lost}
            await asyncio.wait({failing, *causes}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(causes, timeout=_CAUSE_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await self._stop_with_group()
            return self._member.lost.result() if self._member.lost.done() else failing.result()
        finally:
            failing.cancel()
            closing.cancel()

    async def _stop_with_group(self) -> None:
        """Let the process stop, which is no failure, and wait until that cancels the caller."""
        self._serving.drained.set()
        await asyncio.get_running_loop().create_future()

    async def _handle_command(self, command: EngineControl) -> Message:
        match command:
            case SleepEngine() | WakeEngine() | ProbeEngine():
                raise CannotSuspend("An engine of several ranks is not suspended yet")
            case PrepareResume():
                raise InstanceDraining(NOT_FIRST)
        return Done()

    async def _stop_engine(self) -> None:
        await self._engine.stop()
        if self._member is not None:
            await self._member.close()
