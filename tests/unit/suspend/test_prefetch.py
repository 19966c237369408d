"""The pages that a resume on cpu prefetches: those that a process used since its last resume."""

from __future__ import annotations

from typing import cast

import pytest

from services.nodeagent.suspend import memory
from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.cpu import PageOut
from services.nodeagent.suspend.port import Target


class Groups:
    """The control group of one instance."""

    def __init__(self) -> None:
        self.members: tuple[int, ...] = ()

    def pids(self, _: str) -> tuple[int, ...]:
        return self.members

    def list_outside(self, *_: object) -> list[int]:
        return []

    def freeze(self, _: str) -> None:
        pass

    def thaw(self, _: str) -> None:
        pass


async def test_pages_of_a_process_are_prefetched_from_its_second_suspension_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that its host has started again is new, and all of it is resident."""
    prefetched: list[int] = []
    monkeypatch.setattr(memory, "footprint", lambda _: memory.Footprint(pss=100))
    monkeypatch.setattr(memory, "page_out", lambda *_: memory.Footprint(swap=100))
    monkeypatch.setattr(memory, "find_resident", lambda pid: [(pid, 4096)])
    monkeypatch.setattr(memory, "advise", lambda pid, *_: prefetched.append(pid))
    groups = Groups()
    way = PageOut(cast(Cgroups, groups))
    found = []
    for pids in ((11,), (11,), (11, 12), (11, 12), (21,), (21,)):
        groups.members = pids
        target = Target("i", "vllm", ("cpu:0",), pids)
        await way.suspend(target)
        await way.resume(target)
        await way.wait_for_prefetches()
        found.append(sorted(prefetched))
        prefetched.clear()
    assert found == [[], [11], [11], [11, 12], [], [21]]
