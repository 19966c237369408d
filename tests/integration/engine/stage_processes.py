"""The processes of a group of stages."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from shared.contracts.engine import EngineExited, EngineStart
from shared.contracts.stages import Stage, split_layers
from tests.integration.engine.processes import forked
from tests.support.engines import Engines, ZygoteClient
from tests.support.paced_zygote import Pace
from tests.support.segments import FakeLoader, card_of

LAYERS = 4


class Group:
    """The engines of a group, the first stage first."""

    def __init__(self, engines: Engines, client: ZygoteClient, loader: FakeLoader) -> None:
        self.engines, self.client, self.loader = engines, client, loader
        self.starts: list[EngineStart] = []
        self.pids: list[int] = []

    async def begin(self, directory: Path, count: int, pace: Pace | None = None) -> None:
        card = card_of(directory)
        for index, layers in enumerate(split_layers(LAYERS, count)):
            start = self.engines.spec(card) if pace is None else self.engines.paced(card, pace)
            stage = Stage(group_id=f"g{os.getpid()}-{id(self)}", index=index, count=count, layers=layers, secret="x" * 43)
            self.starts.append(start.model_copy(update={"stage": stage}))
        # The last stage starts first: the order does not matter.
        self.pids = [await forked(self.client, start) for start in reversed(self.starts)][::-1]

    async def ready(self) -> str:
        for start in self.starts:
            report = await self.engines.settled(start.instance_id)
            assert report.state == "ready", report.error
        return self.starts[0].instance_id

    def states(self) -> list[str]:
        return [self.engines.reports[s.instance_id][-1].state for s in self.starts]

    async def close(self) -> None:
        """Kill what runs, and wait until the zygote has reported all exits."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = set(self.pids)
        while left:
            line = await self.client.hear()
            if isinstance(line, EngineExited):
                left.discard(line.pid)
