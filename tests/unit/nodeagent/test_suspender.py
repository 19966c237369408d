"""The suspender's work beside the suspend methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.nodeagent.suspend.cgroups import Cgroups, FreezerV2
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.suspender import Suspender


class Busy(Cgroups):
    """An empty group is busy until shortly after its last process has ended."""

    refusals = 2

    def remove(self, instance_id: str) -> bool:
        self.refusals -= 1
        return self.refusals < 0 and super().remove(instance_id)


async def test_control_group_of_an_exited_engine_is_removed(tmp_path: Path) -> None:
    groups = Busy("n", tmp_path, FreezerV2())
    assert groups.create("i") is not None
    unused: Any = None
    await Suspender({}, groups, MemoryUsage({}), unused, 1.0).on_ended("i")
    assert list(groups.known()) == []
