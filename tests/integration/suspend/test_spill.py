"""Snapshots of the CUDA checkpoint are written to swap.

They are host memory of frozen processes. Processes and pages are real; the driver is a fake.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.nodeagent.suspend import memory
from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.cuda import CudaCheckpoint
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import Target
from shared.errors import CannotSuspend
from tests.integration.suspend.process_tree import MIB, Tree
from tests.support.process_memory import bounds_of_pss
from tests.unit.suspend.fake_driver import FakeDriver, FakeGpu


@pytest.fixture
def tree(able: None, groups: Cgroups) -> Iterator[Tree]:
    found = Tree(60, 1)
    yield found
    groups.kill("i")
    found.close()


def on_gpu(tree: Tree, groups: Cgroups) -> tuple[CudaCheckpoint, Target]:
    target = Target("i", "vllm", ("cuda:0",), tree.target(groups).pids, hosted=True)
    driver = FakeDriver(dict.fromkeys(target.pids, 1 << 30))
    return CudaCheckpoint(driver, "", groups, MemoryUsage({"cuda:0": FakeGpu(driver)})), target


async def test_a_snapshot_is_spilled_and_restored_byte_for_byte(tree: Tree, groups: Cgroups) -> None:
    before = tree.digest()
    way, target = on_gpu(tree, groups)
    assert way.explain_spill_unavailable() == ""
    await way.suspend(target)
    least_before, most_before = bounds_of_pss(target.pids)
    freed = await way.spill(target)
    assert freed >= 100 * MIB
    least, most = bounds_of_pss(target.pids)
    assert least_before - most <= freed <= most_before - least
    assert groups.is_frozen("i")
    await way.resume(target)
    assert tree.digest() == before


async def test_snapshot_stays_in_host_memory_without_the_capability(
    tree: Tree, groups: Cgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, target = on_gpu(tree, groups)
    await way.suspend(target)
    monkeypatch.setattr(memory, "has_capability", lambda number: number != memory.CAP_SYS_NICE)
    with pytest.raises(CannotSuspend, match="lacks CAP_SYS_NICE"):
        await way.spill(target)
    monkeypatch.setattr(memory, "swap_space", lambda: memory.Swap(0, 0))
    assert "no swap" in way.explain_spill_unavailable()
    await way.resume(target)
