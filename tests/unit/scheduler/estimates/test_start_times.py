"""Learning from starts, and predictions from what was learned."""

from __future__ import annotations

import pytest

from services.scheduler.domain.estimates.start_learning import updated_estimates
from services.scheduler.domain.estimates.start_times import PRIOR_MS, Forecast, bandwidth, least_start_s
from services.scheduler.domain.events import LoaderStatusReceived
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.measurements import ANYWHERE, Estimate, estimate_key
from shared.contracts.loader import CachedModel, LinkStatus, LoaderStatus
from shared.contracts.node import InstanceState
from shared.contracts.phases import NEW_ZYGOTE, Phase, PhaseSpan
from shared.contracts.plans import Candidate, PlanRecord
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

WEIGHTS = 1000 * MIB


def span(phase: Phase, ms: float, start_ms: float = 0, **detail: str) -> PhaseSpan:
    return PhaseSpan(phase=phase, start_ms=start_ms, duration_ms=ms, detail=dict(detail))


def plan(*spans: PhaseSpan, **chosen: object) -> PlanRecord:
    given: dict[str, object] = {"node": "n", "device_ids": ("cpu:0",), "way": "load", "source": "ssd", **chosen}
    candidate = Candidate.model_validate(given)
    return PlanRecord(
        plan_id="p", model="a", created=0, trigger="demand", way=candidate.way, chosen=candidate, outcome="ready", measured=spans
    )


@pytest.fixture
def w() -> World:
    world = World()
    world.node("n", 4000 * MIB)
    world.node("other", 4000 * MIB)
    world.model("a", weights=WEIGHTS)
    return world


def known(state: ClusterState, node: str, quantity: str, model: str = "a") -> float:
    return state.estimates[estimate_key(model, node)].parameters[quantity].value


def teach(state: ClusterState, record: PlanRecord) -> list[Estimate]:
    found = updated_estimates(state, record)
    apply(state, [Put(e) for e in found])
    return found


def forecast(w: World, node: str, *, leaving: bool = False) -> tuple[dict[str, float], float]:
    model = w.state.models["a"]
    return Forecast(w.state, model.card, w.now).predict_ms(booking_of(w.state, node, "cpu:0"), leaving=leaving)


def test_least_start_is_the_measured_phases_without_the_load(w: World) -> None:
    model = w.state.models["a"]
    assert least_start_s(w.state, model) == 0.0, "nothing was measured"
    teach(w.state, plan(span(Phase.CONTAINER, 30), span(Phase.LOAD, 5000), span(Phase.INIT, 470)))
    assert least_start_s(w.state, model) == pytest.approx(0.5)


def test_least_start_is_unknown_while_a_suspended_instance_can_resume(w: World) -> None:
    teach(w.state, plan(span(Phase.CONTAINER, 30), span(Phase.INIT, 470)))
    parked = w.up("a")
    w.can_suspend(parked)
    parked.state = InstanceState.SUSPENDED
    w.report()
    assert least_start_s(w.state, w.state.models["a"]) == 0.0


def test_zygote_start_is_excluded_from_the_estimate(w: World) -> None:
    """A zygote's start is paid once.

    A node's first engine waits for the zygote's imports; the next ones do not.
    """
    teach(w.state, plan(span(Phase.CONTAINER, 9000, launcher=NEW_ZYGOTE), span(Phase.INIT, 480)))
    assert "container" not in w.state.estimates[estimate_key("a", "n")].parameters
    teach(w.state, plan(span(Phase.CONTAINER, 30, launcher="zygote"), span(Phase.INIT, 480)))
    assert known(w.state, "n", "container") == pytest.approx(30)
    assert known(w.state, "n", "init") == pytest.approx(480)


def test_start_in_an_executor_is_an_attach_only_where_one_runs(w: World) -> None:
    w.model("a", weights=WEIGHTS, isolation="shared")
    teach(w.state, plan(span(Phase.CONTAINER, 700), span(Phase.INIT, 20, 700)))
    assert forecast(w, "n")[0]["container"] > PRIOR_MS["container"], "it has never been attached"
    teach(w.state, plan(span(Phase.ATTACH, 30), span(Phase.INIT, 20, 30)))
    model = w.state.models["a"]
    for node in ("n", "other"):
        empty = booking_of(w.state, node, "cpu:0")
        estimates = Forecast(w.state, model.card, w.now)
        first, later = (estimates.predict(b, leaving=False).phases for b in (empty, empty._replace(executor_bytes=MIB)))
        assert ("container" in first, "attach" in first) == (True, False)
        assert ("container" in later, "attach" in later) == (False, True)


def test_loads_from_memory_do_not_change_the_disk_s_estimate(w: World) -> None:
    teach(w.state, plan(span(Phase.LOAD, 1), span(Phase.PROFILE, 100), source="dram", resident_bytes=WEIGHTS))
    assert set(w.state.estimates[estimate_key("a", "n")].parameters) == {"profile"}


def test_bandwidth_of_a_tier_is_learned_without_queueing_time(w: World) -> None:
    spans = (span(Phase.FETCH, 1000), span(Phase.LOAD, 1000, start_ms=500))
    teach(w.state, plan(*spans, source="remote", queued_ms=500.0))
    assert known(w.state, "n", bandwidth("remote")) == pytest.approx(WEIGHTS / 1.0)


def test_each_gpu_of_a_node_has_its_own_bandwidth_estimate(w: World) -> None:
    """Each GPU of a node has its own bandwidth estimate.

    An unused GPU takes the estimate of the node's others.
    """
    w.node("gpus", 4000 * MIB, devices=("cuda:0", "cuda:1", "cuda:2"))
    for device, ms in (("cuda:0", 100.0), ("cuda:1", 1000.0)):
        teach(w.state, plan(span(Phase.LOAD, ms), node="gpus", device_ids=(device,)))
    found = Forecast(w.state, w.state.models["a"].card, w.now)
    load = {d: found.predict(booking_of(w.state, "gpus", d), leaving=False).phases["load"] for d in ("cuda:0", "cuda:1", "cuda:2")}
    assert (load["cuda:0"], load["cuda:1"]) == pytest.approx((100.0, 1000.0))
    assert 100.0 < load["cuda:2"] < 1000.0


def test_unseen_node_uses_the_models_estimate_from_other_nodes(w: World) -> None:
    before = forecast(w, "other")[0]["init"]
    teach(w.state, plan(span(Phase.INIT, 900)))
    assert before == PRIOR_MS["init"]
    assert forecast(w, "other")[0]["init"] == known(w.state, ANYWHERE, "init") == pytest.approx(900)


def test_teardown_time_of_victims_is_learned_per_node(w: World) -> None:
    teach(w.state, plan(span(Phase.RESERVE, 1200), clearing="evict", way="evict_then_load"))
    assert forecast(w, "n", leaving=True)[0]["reserve"] == pytest.approx(PRIOR_MS["reserve"] + 1200)
    assert known(w.state, "n", "leaving", model="") == pytest.approx(1200)


def test_wait_before_the_decision_is_not_charged_to_the_victim(w: World) -> None:
    """The wait before the decision does not count for the victim.

    A model waited three seconds for another model's turn to end, and half a second for its
    teardown.
    """
    spans = (span(Phase.RESERVE, 2800), span(Phase.RESERVE, 400, start_ms=2800), span(Phase.INIT, 300, start_ms=3200))
    waited = plan(*spans, clearing="evict", way="evict_then_load", took_ms=700.0).model_copy(update={"measured_ms": 3500.0})
    teach(w.state, waited)
    assert known(w.state, "n", "leaving", model="") == pytest.approx(400)


def test_first_start_of_another_engine_counts_in_full(w: World) -> None:
    """The first start of another engine counts in full.

    vLLM takes half a minute, the builtin engine half a second: a bound by that prior would give two
    seconds.
    """
    w.model("v", engine="vllm")
    spans = (span(Phase.CONTAINER, 480), span(Phase.INIT, 24_000, start_ms=480), span(Phase.PROFILE, 70, start_ms=24_480))
    teach(w.state, plan(*spans).model_copy(update={"model": "v"}))
    found = Forecast(w.state, w.state.models["v"].card, w.now).predict_ms(booking_of(w.state, "other", "cpu:0"), leaving=False)[0]
    assert (found["container"], found["init"], found["profile"]) == pytest.approx((480, 24_000, 70))


def test_failed_start_does_not_update_estimates(w: World) -> None:
    assert updated_estimates(w.state, plan(span(Phase.INIT, 5)).model_copy(update={"outcome": "failed"})) == []


def loader(w: World, node: str, *links: LinkStatus, **more: object) -> None:
    status = LoaderStatus.model_validate({"node": node, "boot_id": "b", "links": links, **more})
    w.send(LoaderStatusReceived(w.now, status))


def test_loads_queued_on_a_link_delay_a_start(w: World) -> None:
    idle = forecast(w, "n")[0]["load"]
    loader(w, "n", LinkStatus(link="ssd:a", finish_ms=3000.0), bytes_per_second=1e9)
    assert forecast(w, "n")[0]["load"] == pytest.approx(idle + 3000)
    w.now += 1.0
    assert forecast(w, "n")[0]["load"] == pytest.approx(idle + 2000)
    loader(w, "n", LinkStatus(link="ssd:a"), bytes_per_second=1e9)
    assert not w.state.links_busy_until


def test_start_not_yet_reported_by_its_loader_adds_queueing_delay(w: World) -> None:
    loader(w, "n", bytes_per_second=1e9)
    w.now += 0.1
    w.demand("a")
    assert [s.node for s in w.starts("a")] == ["n"]
    w.model("b", weights=WEIGHTS)
    w.demand("b")
    assert [s.node for s in w.starts("b")] == ["other"], "the other node's disk is idle"


def test_node_with_files_on_disk_is_preferred_over_a_remote_fetch(w: World) -> None:
    w.state.models["a"] = w.state.models["a"].__class__(
        w.state.models["a"].card.model_copy(
            update={"info": w.state.models["a"].card.info.model_copy(update={"source": "s3://bucket/a"})}
        )
    )
    links = (LinkStatus(link="ssd:a", bytes_per_second=4e9), LinkStatus(link="remote:b", bytes_per_second=1e8))
    revision = w.state.models["a"].card.info.revision
    loader(w, "other", *links, cached=(CachedModel(weights_id=revision, tier="ssd", nbytes=WEIGHTS),), bytes_per_second=1e8)
    loader(w, "n", *links, bytes_per_second=1e8)
    assert forecast(w, "other")[0]["load"] == pytest.approx(WEIGHTS / 4e9 * 1e3)
    assert forecast(w, "n")[0]["load"] == pytest.approx(WEIGHTS / 1e8 * 1e3)
    w.demand("a")
    assert [s.node for s in w.starts("a")] == ["other"]
    record = w.state.last_plan_of("a")
    assert record is not None
    assert record.chosen is not None
    assert record.chosen.source == "ssd"


def test_plan_records_prediction_and_error(w: World) -> None:
    w.demand("a")
    w.now += 2.0
    w.get_ready("a")
    record = w.state.last_plan_of("a")
    assert record is not None
    assert record.chosen is not None
    assert record.chosen.took_ms == pytest.approx(2000)
    assert record.chosen.predicted_ms is not None
    assert record.chosen.error_ms == pytest.approx(2000 - record.chosen.predicted_ms)


@pytest.mark.parametrize(
    ("source", "buses", "seconds"),
    [
        (1e9, (1e8, 2e8), WEIGHTS / 2 / 1e8),  # the slower device's link, with its half
        (1e8, (1e8, 2e8), WEIGHTS / 1e8),  # the source's link, with all bytes
        (1e8, (1e9, 1e9), WEIGHTS / 1e8),
        (1e9, (2e8, 1e8), WEIGHTS / 2 / 1e8),
    ],
)
def test_devices_of_a_node_load_their_parts_at_the_same_time(
    w: World, source: float, buses: tuple[float, float], seconds: float
) -> None:
    w.node("wide", 4000 * MIB, devices=("cpu:0", "cpu:1"))
    links = [LinkStatus(link="ssd:/models", bytes_per_second=source, loads=0)]
    links += [LinkStatus(link=f"bus:cpu:{i}", bytes_per_second=bus, loads=0) for i, bus in enumerate(buses)]
    w.loader("wide", (), links=tuple(links))
    devices = [booking_of(w.state, "wide", f"cpu:{i}") for i in range(2)]
    found = Forecast(w.state, w.state.models["a"].card, w.now).predict_set(devices, leaving=False)
    assert found.phases["load"] == pytest.approx(seconds * 1e3)
    assert found.ms >= found.phases["load"]
    assert found.cost.total_s == pytest.approx(found.ms / 1e3)


def test_learned_bandwidth_is_that_of_all_devices_together(w: World) -> None:
    w.node("wide", 4000 * MIB, devices=("cpu:0", "cpu:1"))
    teach(w.state, plan(span(Phase.LOAD, 2000), node="wide", device_ids=("cpu:0", "cpu:1")))
    w.loader("wide", (), links=(LinkStatus(link="bus:cpu:0", bytes_per_second=1e6, loads=0),))
    devices = [booking_of(w.state, "wide", f"cpu:{i}") for i in range(2)]
    forecast = Forecast(w.state, w.state.models["a"].card, w.now)
    assert forecast.predict_set(devices, leaving=False) == forecast.predict(devices[0], leaving=False)
