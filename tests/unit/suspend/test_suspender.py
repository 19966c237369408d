"""The suspender's checks after a resume, with fake methods and devices.

tests/integration/suspend has real processes.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from services.nodeagent.domain.state import Instance, Outlook, SuspendState
from services.nodeagent.suspend import suspender
from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import SuspendResult, Target
from services.nodeagent.suspend.suspender import Suspender
from shared.contracts.engine import EngineProbed
from shared.contracts.node import SuspendWay
from shared.errors import CannotSuspend, DeviceFailed, RestoreFailed
from tests.unit.nodeagent.world import start

MIB = 1 << 20
NO_GROUPS = Cgroups("n", None, None, "none here")


class Numbers(MemoryUsage):
    """Fake readings.

    Attributes:
        there: MiB that engines use now.
    """

    def __init__(self, there: int) -> None:
        super().__init__({})
        self.there = there
        self.lost = False

    def used_bytes(self, target: Target) -> int:
        return self.used_bytes_with_swap(target)

    def used_bytes_with_swap(self, target: Target) -> int:
        if self.lost:
            raise DeviceFailed("NVML cannot read cuda:0")
        return self.there * MIB


class SuspendMethod:
    """A method that does nothing and reports that it can suspend."""

    def __init__(self, name: SuspendWay, resume_s: float = 0.1) -> None:
        self.name: SuspendWay = name
        self.resume_s = resume_s
        self.fails = ""
        self.renamed = ("", "")

    def explain_unavailable(self) -> str:
        return ""

    def outlook(self, target: Target) -> Outlook:
        return Outlook(way=self.name, resume_s=self.resume_s)

    async def suspend(self, target: Target) -> SuspendResult:
        if self.fails:
            raise CannotSuspend(self.fails)
        return SuspendResult(100, 0, 100)

    async def resume(self, target: Target) -> None: ...

    def learn(self, snapshot_bytes: int, took_s: float) -> None: ...

    def forget(self, instance_id: str) -> None: ...

    def rename(self, old: str, new: str) -> None:
        self.renamed = (old, new)


async def awake(subject: str, request: Any, reply: Any) -> Any:
    return EngineProbed(same=True, took_ms=1.0)


def make_suspender(there: int, *ways: SuspendMethod) -> Suspender:
    return Suspender({w.name: w for w in ways or (SuspendMethod("cpu"),)}, NO_GROUPS, Numbers(there), awake, 1.0)


def suspended(way: SuspendWay, *, frees: int, left: int, snapshot: int) -> Instance:
    suspend_state = SuspendState(
        outlook=Outlook(way=way), freezing=True, frees_bytes=frees * MIB, left_bytes=left * MIB, snapshot_bytes=snapshot * MIB
    )
    return Instance(command=start(), token=1, progress_at=0.0, suspend_state=suspend_state)


@pytest.mark.parametrize(("there", "resumes"), [(300, True), (30, False)])
async def test_resume_on_cpu_must_restore_pages_that_stayed_in_swap(there: int, resumes: bool) -> None:
    """On cpu, bytes that stayed in swap must be back too.

    A second suspension frees only what was touched since the first. A dead process lacks all of it.
    """
    instance = suspended("cpu", frees=4, left=1, snapshot=320)
    if resumes:
        assert await make_suspender(there).resume(instance, "cpu") == there * MIB
        return
    with pytest.raises(RestoreFailed, match="30 of the 321 MiB"):
        await make_suspender(there).resume(instance, "cpu")


async def test_resume_on_other_devices_must_restore_all_freed_bytes() -> None:
    """On other devices, all freed bytes must be back.

    The snapshot's size does not matter: a sleeping engine keeps none, and one written to swap keeps
    less.
    """
    instance = suspended("sleep", frees=900, left=100, snapshot=0)
    assert await make_suspender(1000, SuspendMethod("sleep")).resume(instance, "sleep") == 1000 * MIB
    with pytest.raises(RestoreFailed, match="500 of the 1000 MiB"):
        await make_suspender(500, SuspendMethod("sleep")).resume(instance, "sleep")


async def test_unreadable_device_fails_the_assessment_and_the_resume() -> None:
    numbers = Numbers(1000)
    numbers.lost = True
    found = Suspender({"sleep": SuspendMethod("sleep")}, NO_GROUPS, numbers, awake, 1.0)
    outlook, used = await found.assess(alive())
    assert (outlook.way, outlook.reason, used) == (None, "NVML cannot read cuda:0", 0)
    with pytest.raises(RestoreFailed, match="NVML cannot read cuda:0"):
        await found.resume(suspended("sleep", frees=900, left=100, snapshot=0), "sleep")


async def test_paused_engine_serves_again_though_its_device_cannot_be_read() -> None:
    """It has kept its memory, and would be started cold otherwise."""
    numbers = Numbers(1000)
    numbers.lost = True
    found = Suspender({}, NO_GROUPS, numbers, awake, 1.0)
    paused = alive().model_copy(update={"suspend_state": SuspendState(used_bytes=900 * MIB)})
    assert await found.resume(paused, None) == 900 * MIB


async def test_way_of_an_earlier_agent_that_this_one_lacks_is_an_error() -> None:
    """The agent ends after an error that is not a `ThawError`, and again after its restart."""
    found = make_suspender(1000, SuspendMethod("sleep"))
    with pytest.raises(RestoreFailed, match="THAW_SUSPEND"):
        await found.resume(suspended("cpu", frees=4, left=1, snapshot=320), "cpu")
    with pytest.raises(RestoreFailed, match="THAW_SUSPEND"):
        await found.hand_over(suspended("cpu", frees=4, left=1, snapshot=320), alive())
    with pytest.raises(CannotSuspend, match="THAW_SUSPEND"):
        await found.suspend(alive(), "cpu")
    with pytest.raises(CannotSuspend):
        await found.spill(alive(), "cpu")


async def test_state_of_a_template_is_kept_for_the_instance_that_takes_its_engine() -> None:
    method = SuspendMethod("cpu")
    taker = alive().model_copy(update={"command": start("taker")})
    await make_suspender(1000, method).hand_over(suspended("cpu", frees=4, left=1, snapshot=320), taker)
    assert method.renamed == ("i", "taker")


def alive() -> Instance:
    """Return an instance whose process is the test's own, which stays untouched."""
    return Instance(command=start(), token=1, progress_at=0.0, pid=os.getpid(), process_start=1)


async def test_failed_method_is_replaced_by_the_next_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that failed with a model is replaced by the next best.

    CUDA's checkpoint always fails with memory shared between processes.
    """
    quick, slow = SuspendMethod("cuda", 0.1), SuspendMethod("sleep", 0.5)
    found = make_suspender(100, quick, slow)
    assert (await found.assess(alive()))[0].way == "cuda"
    quick.fails = "cuCheckpointProcessCheckpoint of pid 1 failed: CUDA_ERROR_NOT_SUPPORTED"
    with pytest.raises(CannotSuspend, match="NOT_SUPPORTED"):
        await found.suspend(alive(), "cuda")
    assert (await found.assess(alive()))[0].way == "sleep"
    monkeypatch.setattr(suspender, "_TRIED_AGAIN_S", 0.0)
    assert (await found.assess(alive()))[0].way == "cuda", "what failed may have been for want of memory"


async def test_failed_method_is_retried_if_there_is_no_other() -> None:
    only = SuspendMethod("cpu")
    found = make_suspender(100, only)
    only.fails = "swap is full"
    with pytest.raises(CannotSuspend):
        await found.suspend(alive(), "cpu")
    assert (await found.assess(alive()))[0].way == "cpu"


@pytest.mark.parametrize(("expected_s", "asked_ms"), [(0.1, 1_000), (50.0, 150_000)])
async def test_resumed_engine_has_time_to_respond_according_to_its_size(expected_s: float, asked_ms: int) -> None:
    """A resumed engine has time to respond according to its size.

    A hundred gibibytes of weights are not read again within seconds.
    """
    asked: list[int] = []

    async def waking(subject: str, request: Any, reply: Any) -> Any:
        asked.append(request.deadline_ms)
        return EngineProbed(same=True, took_ms=1.0)

    found = Suspender({"sleep": SuspendMethod("sleep")}, NO_GROUPS, Numbers(1000), waking, 1.0)
    instance = suspended("sleep", frees=900, left=100, snapshot=0)
    outlook = instance.suspend_state.outlook.model_copy(update={"resume_s": expected_s})
    await found.resume(
        instance.model_copy(update={"suspend_state": instance.suspend_state.model_copy(update={"outlook": outlook})}), "sleep"
    )
    assert 0.9 * asked_ms <= asked[0] <= asked_ms
