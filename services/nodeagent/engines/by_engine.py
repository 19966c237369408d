"""Chooses the launcher: one for builtin engines, one for hosts of other engines."""

from __future__ import annotations

import asyncio

from services.nodeagent.engines.launcher import Launcher
from shared.contracts.engine import EngineStart
from shared.contracts.executor import ExecutorStart
from shared.contracts.models import ModelCard


class LauncherByEngine:
    """Delegates to the launcher of the engine's kind."""

    def __init__(self, builtin: Launcher, hosts: Launcher) -> None:
        self._builtin = builtin
        self._hosts = hosts

    def name_for(self, start: EngineStart) -> str:
        return self._choose_launcher(start).name_for(start)

    async def run(self) -> None:
        await asyncio.gather(self._builtin.run(), self._hosts.run())

    async def until_warm(self) -> None:
        await self._builtin.until_warm()

    async def launch(self, start: EngineStart | ExecutorStart) -> int:
        return await self._choose_launcher(start).launch(start)

    async def exit_status(self, pid: int, within_s: float) -> int | None:
        found = await self._hosts.exit_status(pid, within_s)
        return found if found is not None else await self._builtin.exit_status(pid, within_s)

    async def clean_up(self, instance_id: str, card: ModelCard) -> None:
        await (self._builtin if card.spec.engine == "builtin" else self._hosts).clean_up(instance_id, card)

    async def close(self) -> None:
        await self._builtin.close()
        await self._hosts.close()

    def _choose_launcher(self, start: EngineStart | ExecutorStart) -> Launcher:
        return self._builtin if isinstance(start, ExecutorStart) or start.card.spec.engine == "builtin" else self._hosts
