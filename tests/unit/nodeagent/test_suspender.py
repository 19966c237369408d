"""The suspender's work beside the suspend methods."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.nodeagent.suspend.cgroups import Cgroups, FreezerV2
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.suspender import Suspender
from shared.processes import MARK_VARIABLE, mark_of

_UNUSED: Any = None


class Busy(Cgroups):
    """An empty group is busy until shortly after its last process has ended."""

    refusals = 2

    def remove(self, instance_id: str) -> bool:
        self.refusals -= 1
        return self.refusals < 0 and super().remove(instance_id)


async def test_control_group_of_an_exited_engine_is_removed(tmp_path: Path) -> None:
    groups = Busy("n", tmp_path, FreezerV2())
    assert groups.create("i") is not None
    await Suspender({}, groups, MemoryUsage({}), _UNUSED, 1.0).on_ended("i")
    assert list(groups.known()) == []


def test_only_for_hosted_engines_are_marked_processes_searched(tmp_path: Path) -> None:
    groups = Cgroups("n", tmp_path, FreezerV2())
    marked = {**os.environ, MARK_VARIABLE: mark_of(groups.scope, "i")}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=marked, stdin=subprocess.PIPE) as left:
        suspender = Suspender({}, groups, MemoryUsage({}), _UNUSED, 1.0)
        asyncio.run(suspender.on_ended("i", is_hosted=False))
        assert left.poll() is None, "only hosts mark processes"
        asyncio.run(suspender.on_ended("i"))
        assert left.wait(60) < 0
