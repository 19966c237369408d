"""A node's loader as a process, and its statuses."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path

from shared.contracts import subjects
from shared.contracts.loader import DeviceMemory, Inspected, InspectModel, LoaderStatus
from shared.contracts.models import ModelCard, ModelSpec
from tests.integration.nodeagent.harness import Node


class Loaders:
    """The node's loader, and its statuses."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._status: LoaderStatus | None = None
        self._changed = asyncio.Condition()
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        before = self._status.boot_id if self._status is not None else ""
        self.process = self._node.spawn_loader()
        await self.until(lambda s: s.boot_id != before)

    async def hear(self, status: LoaderStatus) -> None:
        async with self._changed:
            self._status = status
            self._changed.notify_all()

    async def until(self, wanted: Callable[[LoaderStatus], bool]) -> LoaderStatus:
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self._status is not None and wanted(self._status))
            assert self._status is not None
            return self._status

    async def memory(self, wanted: Callable[[DeviceMemory], bool]) -> DeviceMemory:
        [found] = (await self.until(lambda s: bool(s.memory) and wanted(s.memory[0]))).memory
        assert found.free_bytes + found.mapped_bytes + found.reusable_bytes + found.lent_bytes == found.total_bytes
        return found

    async def card(self, name: str, source: Path) -> ModelCard:
        spec = ModelSpec(name=name, source=str(source))
        answer = await self._node.mesh.request(subjects.loader_command(self._node.name), InspectModel(spec=spec), Inspected)
        return ModelCard(spec=spec, info=answer.info, created=0)
