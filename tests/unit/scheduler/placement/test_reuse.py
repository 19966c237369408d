"""Placement on separate devices: units of stopped models are kept, of running ones shared."""

from __future__ import annotations

import pytest

from services.scheduler.domain.effects import SendExpectation, SendPrepare
from services.scheduler.domain.estimates.start_learning import updated_estimates
from services.scheduler.domain.estimates.start_times import REUSING, Forecast, bandwidth
from services.scheduler.domain.prewarm.expectations import MOST_GROUPS
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.measurements import estimate_key
from services.scheduler.domain.state.volatile import EXPECTATION_GROUPS
from shared.contracts.loader import EXPECT_EVERY_S, CachedModel, DeviceMemory, KvOnDevice, LinkStatus, LoaderStatus, WeightsOnDevice
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.plans import PlanRecord
from shared.sizing import need_of
from shared.unit_charges import shared_units
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

WEIGHTS = 1000 * MIB


def there(name: str, missing: int, *, unmapped: int | None = None, exclusive: int = 0, read: int = WEIGHTS) -> WeightsOnDevice:
    """Weights of a model of which `missing` MiB are not on the device."""
    return WeightsOnDevice(
        weights_id=f"rev-/m/{name}",
        total_bytes=WEIGHTS,
        missing_bytes=missing * MIB,
        read_bytes=read,
        unmapped_bytes=WEIGHTS if unmapped is None else unmapped * MIB,
        exclusive_bytes=exclusive * MIB,
    )


def memory(*weights: WeightsOnDevice, mapped: int = 0, lent: int = 0, total: int = 4000, device: str = "cpu:0") -> DeviceMemory:
    return DeviceMemory(
        device_id=device,
        total_bytes=total * MIB,
        free_bytes=(total - mapped - lent) * MIB,
        mapped_bytes=mapped * MIB,
        reusable_bytes=0,
        lent_bytes=lent * MIB,
        weights=weights,
    )


@pytest.fixture
def w() -> World:
    world = World()
    world.node("n1", 4000 * MIB)
    world.node("n2", 4000 * MIB)
    world.model("m", weights=WEIGHTS)
    return world


def chosen(w: World, model: str = "m") -> PlanRecord:
    plan = w.state.last_plan_of(model)
    assert plan is not None
    assert plan.chosen is not None
    return plan


def own_need(w: World, model: str) -> int:
    need = need_of(w.state.models[model].card)
    return need.total - need.weights


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_model_goes_where_most_of_its_bytes_are(w: World, node: str) -> None:
    for name in ("n1", "n2"):
        cached = (CachedModel(weights_id="rev-/m/m", tier="dram", nbytes=WEIGHTS),)
        w.loader(name, [memory(there("m", 100 if name == node else 800))], cached=cached)
    w.demand("m")
    plan = chosen(w)
    assert plan.chosen is not None
    assert (plan.chosen.node, plan.chosen.ready_by, plan.chosen.resident_bytes) == (node, "reuse", 900 * MIB)
    assert "900.0 of 1000.0 MiB already on cpu:0" in plan.reason


def test_only_missing_bytes_count_for_the_copy_and_what_is_read_for_the_source(w: World) -> None:
    links = (
        LinkStatus(link="bus:cpu:0", bytes_per_second=1000 * MIB),
        LinkStatus(link="ssd:x", bytes_per_second=100 * MIB),
    )
    ssd = (CachedModel(weights_id="rev-/m/m", tier="ssd", nbytes=WEIGHTS),)
    dram = (CachedModel(weights_id="rev-/m/m", tier="dram", nbytes=WEIGHTS),)

    def load_ms() -> float:
        found = Forecast(w.state, w.state.models["m"].card, w.now).predict(booking_of(w.state, "n1", "cpu:0"), leaving=False)
        return found.phases["load"]

    w.loader("n1", [memory(there("m", 500))], links=links, cached=dram)
    assert load_ms() == pytest.approx(500 + 20)
    w.loader("n1", [memory(there("m", 500))], links=links, cached=ssd)
    assert load_ms() == pytest.approx(10_000 + 20), "the whole checkpoint is read"
    w.loader("n1", [memory(there("m", 500, read=500 * MIB))], links=links, cached=ssd)
    assert load_ms() == pytest.approx(5_000 + 20), "only missing units are read"
    w.loader("n1", [memory(there("m", 0, read=0))], links=links, cached=ssd)
    assert load_ms() == pytest.approx(20)


def test_the_weights_are_prepared_on_the_device(w: World) -> None:
    w.loader("n1", [memory(there("m", 100, read=100 * MIB))])
    w.demand("m")
    [prepare] = w.sent(SendPrepare)
    assert (prepare.node, prepare.command.device) == ("n1", "cpu:0")


@pytest.mark.parametrize("device", ["cpu:0", "cuda:0"])
def test_an_instance_needs_only_what_it_does_not_share(device: str) -> None:
    """Two fine-tunes of a base fit beside it, on a device that would hold two whole instances."""
    w = World()
    for name in ("base", "one", "two"):
        w.model(name, weights=WEIGHTS)
    own = own_need(w, "base")
    budget = WEIGHTS + 2 * 200 * MIB + 3 * own
    w.node("n", budget, devices=(device,))
    w.loader("n", [memory(total=budget // MIB, device=device)])
    w.up("base")
    w.loader(
        "n",
        [
            memory(
                there("base", 0, unmapped=0, exclusive=0),
                there("one", 200, unmapped=200),
                there("two", 200, unmapped=200),
                mapped=1000,
                device=device,
            )
        ],
    )
    w.up("one")
    plan = chosen(w, "one")
    assert plan.chosen is not None
    assert (plan.chosen.needed_bytes, plan.chosen.clearing) == (200 * MIB + own, "none")
    w.up("two")
    assert len(w.of("base")) == len(w.of("one")) == len(w.of("two")) == 1
    booked = booking_of(w.state, "n", device)
    assert (booked.held_bytes, booked.free_bytes) == (budget, 0)


def test_shared_units_of_a_stopping_instance_are_charged_to_the_one_that_stays() -> None:
    w = World()
    for name in ("base", "one"):
        w.model(name, weights=WEIGHTS)
    own = own_need(w, "base")
    w.node("n", 4000 * MIB)
    w.loader("n", [memory()])
    w.up("base")
    w.loader("n", [memory(there("base", 0, unmapped=0), there("one", 200, unmapped=200), mapped=1000)])
    w.up("one")
    w.loader("n", [memory(there("base", 0, unmapped=0, exclusive=200), there("one", 0, unmapped=0, exclusive=200), mapped=1200)])
    assert booking_of(w.state, "n", "cpu:0").held_bytes == 1200 * MIB + 2 * own
    w.sleep("base")
    stopping = booking_of(w.state, "n", "cpu:0")
    assert stopping.leaving_bytes == 200 * MIB + own
    w.finish_stops()
    assert booking_of(w.state, "n", "cpu:0").held_bytes == WEIGHTS + own


def test_model_that_waits_for_an_instance_that_does_not_stop_names_it() -> None:
    w = World()
    for name in ("base", "other"):
        w.model(name, weights=WEIGHTS)
    budget = need_of(w.state.models["base"].card).total + 100 * MIB
    w.node("n", budget)
    w.loader("n", [memory(total=budget // MIB)])
    stopping = w.up("base")
    w.loader("n", [memory(there("base", 0, unmapped=0, exclusive=1000), mapped=1000, total=budget // MIB)])
    w.sleep("base")
    for _ in range(int(w.policy.drain_timeout_s + w.policy.stuck_after_s) + 2):
        w.tick(1)
        w.demand("other")
    plan = w.state.last_plan_of("other")
    assert plan is not None
    assert plan.way == "wait"
    assert plan.reason.endswith(f"should have ended, but still holds memory: {stopping.command.instance_id}")


def lending(total: int, *caches: KvOnDevice, mapped: int = 0) -> DeviceMemory:
    lent = sum(k.lent_bytes for k in caches) // MIB
    return memory(mapped=mapped, lent=lent, total=total).model_copy(update={"is_lending": True, "kv": caches})


def test_instances_whose_caches_borrow_pages_book_floors_and_one_growth() -> None:
    w = World()
    for name in ("one", "two", "three"):
        w.model(name, weights=WEIGHTS, engine_args={"kv_cache_bytes": 600 * MIB})
    need = need_of(w.state.models["one"].card)
    assert need.kv_floor < need.kv == 600 * MIB
    growth = need.kv - need.kv_floor
    budget = 3 * (need.total - growth) + growth
    w.node("n", budget)
    w.loader("n", [lending(budget // MIB)])
    for name in ("one", "two", "three"):
        w.up(name)
    assert len(w.of("one")) == len(w.of("two")) == len(w.of("three")) == 1
    full = booking_of(w.state, "n", "cpu:0")
    assert (full.held_bytes, full.free_bytes) == (budget, 0)
    w.sleep("three")
    assert booking_of(w.state, "n", "cpu:0").leaving_bytes == need.total - growth
    w.finish_stops()
    assert booking_of(w.state, "n", "cpu:0").free_bytes == need.total - growth


def test_lent_pages_of_caches_are_no_weights() -> None:
    """They do not raise the bound of what instances that share weights need."""
    cache = KvOnDevice(instance_id="i", floor_bytes=0, lent_bytes=500 * MIB, wanted_bytes=500 * MIB)
    assert shared_units(lending(4000, cache, mapped=1000)).mapped_bytes == 1000 * MIB


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_device_whose_caches_lack_pages_is_avoided(w: World, node: str) -> None:
    """Both are equal otherwise."""
    for name in ("n1", "n2"):
        wanted = 3000 if name == node else 2000
        cache = KvOnDevice(instance_id="i", floor_bytes=0, lent_bytes=2000 * MIB, wanted_bytes=wanted * MIB)
        w.loader(name, [lending(2500, cache)])
    w.demand("m")
    plan = chosen(w)
    assert plan.chosen is not None
    assert plan.chosen.node != node


def test_victims_that_share_units_leave_together_if_one_frees_too_little() -> None:
    w = World()
    for name in ("base", "one", "other"):
        w.model(name, weights=WEIGHTS)
    own = own_need(w, "base")
    budget = 1200 * MIB + 2 * own
    w.node("n", budget)
    w.loader("n", [memory()])
    w.up("base")
    w.loader("n", [memory(there("base", 0, unmapped=0), there("one", 200, unmapped=200), mapped=1000)])
    w.up("one")
    w.loader("n", [memory(there("base", 0, unmapped=0, exclusive=200), there("one", 0, unmapped=0, exclusive=200), mapped=1200)])
    w.tick(10)
    w.demand("other")
    assert len(w.stops("base")) == len(w.stops("one")) == 1
    w.finish_stops()
    assert len(w.of("other", InstanceState.LOADING)) == 1


def test_reusable_units_are_free_memory_for_other_models(w: World) -> None:
    w.loader("n1", [memory(there("m", 0))])
    assert booking_of(w.state, "n1", "cpu:0").free_bytes == 4000 * MIB


def test_pages_of_an_earlier_loader_are_not_shared(w: World) -> None:
    w.model("tuned", weights=WEIGHTS)
    for name in ("m", "tuned"):
        w.loader("n1", [memory(there("m", 0, unmapped=0, read=0), there("tuned", 0, unmapped=0, read=0), mapped=1000, lent=1000)])
        w.up(name)
    running = [*w.of("m"), *w.of("tuned")]
    assert [r.command.device_ids for r in running] == [("cpu:0",), ("cpu:0",)]
    assert booking_of(w.state, "n1", "cpu:0").held_bytes == sum(r.command.reserve_bytes for r in running)


def test_each_part_of_a_load_learns_its_own_speed(w: World) -> None:
    w.loader("n1", [memory(there("m", 500))], cached=(CachedModel(weights_id="rev-/m/m", tier="dram", nbytes=WEIGHTS),))
    w.demand("m")
    plan = chosen(w)
    assert plan.chosen is not None

    def learned(ms: float, **changed: object) -> dict[str, float]:
        assert plan.chosen is not None
        candidate = plan.chosen.model_copy(update={"node": "n1", "queued_ms": 0.0, **changed})
        span = PhaseSpan(phase=Phase.LOAD, start_ms=0, duration_ms=ms)
        apply(
            w.state,
            map(
                Put,
                updated_estimates(w.state, plan.model_copy(update={"outcome": "ready", "chosen": candidate, "measured": (span,)})),
            ),
        )
        return {k: p.value for k, p in w.state.estimates[estimate_key("m", "n1")].parameters.items()}

    assert learned(1020.0)[bandwidth("dram", "cpu:0")] == pytest.approx(500 * MIB)
    assert learned(30.0, resident_bytes=WEIGHTS, read_bytes=0)[REUSING] == pytest.approx(30)
    found = learned(10_030.0, source="ssd", read_bytes=WEIGHTS)
    assert found[bandwidth("ssd", "cpu:0")] == pytest.approx(WEIGHTS / 10)
    assert found[bandwidth("dram", "cpu:0")] == pytest.approx(500 * MIB)


def test_loaders_of_separate_devices_learn_which_models_are_likely(w: World) -> None:
    w.model("often", weights=WEIGHTS, latency_sensitivity=2.0)
    w.loader("n1", [memory()])
    for _ in range(4):
        w.tick(3)
        w.loader("n1", [memory()])
        w.demand("often")
        w.demand("often", 0)
    w.effects.clear()
    for _ in range(int(EXPECT_EVERY_S) + 1):
        w.tick(1)
        w.loader("n1", [memory()])
    *_, sent = w.sent(SendExpectation)
    assert sent.node == "n1"
    found = {m.weights_id: m for m in sent.command.models}
    assert [m.weights_id for m in sent.command.models] == ["rev-/m/often", "rev-/m/m"]
    assert found["rev-/m/often"].likelihood > 0.5 > found["rev-/m/m"].likelihood
    assert found["rev-/m/often"].latency_sensitivity == 2.0


def test_expectations_are_sent_to_a_share_of_many_loaders_at_a_time() -> None:
    w = World()
    w.model("m", weights=WEIGHTS)
    names = [f"n{i}" for i in range(3 * EXPECTATION_GROUPS)]
    for name in names:
        w.node(name, 4000 * MIB)
        w.loader(name, [memory()])
    w.effects.clear()
    at_once = []
    for _ in range(EXPECTATION_GROUPS // MOST_GROUPS):
        before = len(w.sent(SendExpectation))
        w.tick()
        at_once.append(len(w.sent(SendExpectation)) - before)
    assert max(at_once) < len(names) // 3
    assert sorted(s.node for s in w.sent(SendExpectation)) == sorted(names), "each once"
    w.tick()
    assert len(w.sent(SendExpectation)) == len(names), "none is due"


def test_a_loader_without_separate_devices_is_sent_no_expectation(w: World) -> None:
    w.loader("n1", [])
    w.tick(60)
    assert not w.sent(SendExpectation)


def test_a_report_without_the_new_fields_is_understood() -> None:
    old = {"device_id": "cpu:1", "total_bytes": 1, "free_bytes": 1, "mapped_bytes": 0, "reusable_bytes": 0}
    assert LoaderStatus.model_validate({"node": "n", "boot_id": "b", "memory": [old]}).memory[0].weights == ()


def test_host_memory_with_only_missing_bytes_is_no_source(w: World) -> None:
    part = {"weights_id": "rev-/m/m", "model": "m", "segment": "s", "total_bytes": 9, "loaded_bytes": 9, "holders": ()}
    w.loader("n1", [memory(there("m", 100))], segments=({**part, "is_partial": True},))
    assert "rev-/m/m" not in w.state.in_memory
    w.loader("n1", [memory(there("m", 100))], segments=(part,))
    assert w.state.in_memory["rev-/m/m"] == ("n1",)
