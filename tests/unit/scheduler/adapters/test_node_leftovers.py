"""A term forgets its records of a removed node: autoscaled nodes have new names all the time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from services.scheduler import app
from services.scheduler.adapters import clock
from services.scheduler.adapters.database import Database
from services.scheduler.adapters.held_memory import HeldMemory
from services.scheduler.adapters.leadership import Term
from services.scheduler.adapters.ledger import CLOCKS_KEPT_S
from services.scheduler.adapters.load_traces import LoadTraces
from services.scheduler.adapters.outbox import Outbox
from services.scheduler.adapters.spending import Spending
from services.scheduler.domain.effects import ForgetNode, SendRelease
from services.scheduler.metrics import Metrics
from services.scheduler.settings import SchedulerSettings
from shared.contracts.loader import ReleaseWeights, WeightsReleased
from shared.contracts.usage import Period, ViewSpending
from tests.support.node_statuses import instance, status
from tests.unit.scheduler.world import World

RELEASE = ReleaseWeights(instance_id="i-1")
START = 500_000 * 3600.0


class Loaders:
    """A mesh whose loaders answer at once."""

    def __init__(self) -> None:
        self.asked = 0

    async def request(self, *_: object) -> WeightsReleased:
        self.asked += 1
        return WeightsReleased(freed_bytes=0)


def outbox(mesh: Any, forgotten: list[str]) -> Outbox:
    nothing: Any = None
    return Outbox(mesh, nothing, nothing, LoadTraces(), nothing, nothing, 1.0, nothing, nothing, forgotten.append)


async def test_lanes_end_with_their_jobs_and_nodes_are_forgotten() -> None:
    mesh, forgotten = Loaders(), list[str]()
    sender = outbox(mesh, forgotten)
    for _ in range(2):
        sender.node_reported("n", "boot")
        sender.carry_out([SendRelease("n", RELEASE), SendRelease("n", RELEASE)], clock.now())
        await asyncio.gather(*(lane.task for lane in sender._lanes.values()))
        assert not sender._lanes
    assert mesh.asked == 4
    sender.carry_out([ForgetNode("n")], clock.now())
    assert (forgotten, sender._agents) == (["n"], {})
    await sender.close()


class Recorder:
    """A ledger that records what it is given."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    async def record_held(self, _: int, batches: Any) -> None:
        self.ends += [b.end - START for b in batches]

    async def settle_accounts(self, *_: object) -> dict[Any, Any]:
        return {}

    async def read_held_clocks(self) -> dict[str, float]:
        return {"old": START - CLOCKS_KEPT_S}

    async def record_starts(self, *_: object) -> None: ...
    async def record_background(self, *_: object) -> None: ...


async def test_a_forgotten_node_leaves_the_meter_once_it_is_recorded_and_may_return() -> None:
    ledger = Recorder()
    meter = HeldMemory(cast("Any", ledger), World().state, 1, longest_s=5.0)
    await meter.load()
    report = status({"cpu:0": 100}, instance("a-1", 100, "cpu:0"))
    for second in range(3):
        meter.on_status(report.model_copy(update={"seq": second}), START + second)
    meter.forget("n")
    assert meter._nodes, "its last seconds are not recorded yet"
    await meter.flush(START + 3)
    assert (ledger.ends, meter._nodes, meter._clocks) == ([2.0], {}, {"n": START + 2})
    meter.on_status(report, START + 9)
    assert meter._nodes["n"].opened_at == START + 2, "charged from its clock on, as by the next leader"


async def test_metrics_have_no_state_of_a_term_that_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World()
    w.node()

    class Stored:
        def __init__(self, _: object) -> None: ...

        async def load(self, *_: object) -> Any:
            return w.state

    async def fail(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(app, "Repository", Stored)
    monkeypatch.setattr(app, "ensure_streams", fail)
    metrics, mesh, nothing = Metrics(), cast("Any", FakeMesh()), cast("Any", None)
    with pytest.raises(TimeoutError):
        await app._lead(SchedulerSettings(), mesh, Database(nothing, nothing), Term(1), "s", metrics)
    assert list(metrics.nodes()) == []


class FakeMesh:
    replicas = 1

    @property
    def nc(self) -> FakeMesh:
        return self

    def jetstream(self) -> None: ...


class Sums:
    """A ledger whose sums of background work are read while more is recorded."""

    prices = None

    def __init__(self) -> None:
        self.reads = 0
        self.on_read: Any = lambda: None

    async def sum_background_us(self, _: int) -> dict[str, dict[str, float]]:
        self.reads += 1
        self.on_read()
        return {}

    async def sum_compute_us(self, _: int) -> dict[str, Any]:
        return {}

    sum_tokens = sum_starts = sum_byte_s = sum_compute_us


async def test_sums_recorded_during_a_read_are_in_the_next_answer() -> None:
    ledger = Sums()
    spending = Spending(cast("Any", ledger))
    query = ViewSpending(keys=("k",))
    ledger.on_read = spending.note_held
    assert (await spending.view(query, 500_000)).period == Period.of_hour(500_000)
    ledger.on_read = lambda: None
    before = ledger.reads
    await spending.view(query, 500_000)
    assert ledger.reads == before + 2
    await spending.view(query, 500_000)
    assert ledger.reads == before + 2, "nothing is new"
