"""Fair shares of the API keys whose models wait for a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.demand.key_shares import MAX_SHARES, charge_start, may_interrupt, standing_of
from services.scheduler.domain.demand.reports import apply_demand
from services.scheduler.domain.events import DemandBatch, DemandReceived
from services.scheduler.domain.placement.queue import scale_up_queue
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import KeyShare, share_key
from shared.contracts.demand import Demand, KeyDemand
from shared.contracts.node import InstanceState
from tests.support.sizes import size
from tests.unit.scheduler.placement.key_demand import ONE, demand_of, key, starting, wait, world
from tests.unit.scheduler.world import World


def serve(w: World, wanted: Mapping[str, Sequence[KeyDemand]], served: int) -> list[str]:
    """Serve the models one after the other on one device; return their order.

    A model is ready at once, and its requests have finished when it may leave.
    """
    order: list[str] = []
    left = dict(wanted)
    while len(order) < served:
        w.now += w.policy.min_active_s + 0.5
        for agent in w.agents.values():
            for r in agent.instances.values():
                if r.state is InstanceState.LOADING:
                    r.state = InstanceState.READY
            agent.finish_stops()
        w.tick()
        for model in [m for m in left if w.of(m, InstanceState.READY)]:
            order.append(model)
            del left[model]
            w.send(DemandReceived(w.now, Demand(gateway="g", model=model, waiting=0), f"w-{model}"))
        wait(w, left)
    return order


def test_key_with_many_models_does_not_delay_another_key() -> None:
    flood = {f"a{n}": [key("a", 9)] for n in range(6)}
    w = world(*flood, "b")
    wait(w, flood)
    w.now += 3
    order = serve(w, {**flood, "b": [key("b")]}, 7)
    assert order.index("b") <= 1, f"one of a's models had the device already: {order}"


def test_shares_are_in_proportion_to_weights() -> None:
    wanted = {f"a{n}": [key("a")] for n in range(6)} | {f"b{n}": [key("b", weight=3.0)] for n in range(6)}
    w = world(*wanted)
    order = serve(w, wanted, 8)
    charged = [plan.chosen.predicted_ms / 1e3 for d in w.decisions for plan in d.plans if plan.chosen and plan.chosen.predicted_ms]
    tags = [w.state.key_shares[share_key(flow, 0)].tag_s for flow in "ab"]
    assert abs(tags[0] - tags[1]) <= max(charged), f"they differ by one start at most: {tags}"
    assert [name[0] for name in order].count("b") > 4, "b has the weight 3"


def test_requests_of_a_higher_priority_go_first_whatever_their_key_has_received() -> None:
    wanted = {f"a{n}": [key("a", priority=1)] for n in range(3)} | {"b": [key("b")]}
    assert serve(world(*wanted), wanted, 4)[-1] == "b"


def test_starving_models_of_one_key_do_not_delay_those_of_another() -> None:
    flood = {f"a{n}": [key("a")] for n in range(8)}
    w = world(*flood, "b", starve_after_s=1.0, preempt_after_s=1.0)
    wait(w, flood)
    order = serve(w, flood, 2)
    w.now += 30
    later = serve(w, {**{m: k for m, k in flood.items() if m not in order}, "b": [key("b")]}, 2)
    assert "b" in later, later


def test_starving_model_does_not_wait_for_models_of_higher_priority_of_its_key() -> None:
    w = World(policy=Policy(starve_after_s=20.0, preempt_after_s=20.0))
    w.node("n", ONE)
    w.model("low", priority=-10)
    w.model("high", priority=10)
    low = DemandReceived(w.now, Demand(gateway="g", model="low", waiting=1, oldest_wait_ms=25_000, keys=(key("a"),)), "w-low")
    w.send(DemandBatch(w.now, (low, demand_of("high", key("a"), now=w.now))))
    assert w.starts("low")
    assert not w.starts("high")


def test_replicas_that_no_request_needs_go_before_none_by_their_share() -> None:
    w = World()
    w.model("kept", replicas={"min": 1})
    w.model("wanted")
    wait(w, {"wanted": [key("a")]})
    w.now += 5
    tx = Transaction(w.state.fork(), w.now, w.policy)
    tx.put(KeyShare("a", 0, 100.0))
    names = [needed.model.key for needed in scale_up_queue(tx, ["kept", "wanted"])]
    assert names == ["wanted", "kept"], "it has waited longer"


def test_start_is_charged_to_the_keys_that_wait_for_it_in_proportion() -> None:
    w = World()
    w.model("m")
    wait(w, {"m": [key("a", 3), key("b", 1, weight=0.5)]})
    tx = Transaction(w.state.fork(), w.now, w.policy)
    charge_start(tx, starting("m"), 8.0)
    assert {s.flow: s.tag_s for s in tx.state.key_shares.values()} == {"a": 6.0, "b": 4.0}
    assert standing_of(tx.state, "m").tag_s == 4.0
    charge_start(tx, starting("unknown"), 8.0)
    assert len(tx.state.key_shares) == 2


def test_idle_time_gives_no_credit_but_for_the_first_model() -> None:
    w = World()
    for name in ("m", "n"):
        w.model(name)
    wait(w, {"m": [key("a")]})
    tx = Transaction(w.state.fork(), w.now, w.policy)
    for cost in (98.0, 2.0):
        charge_start(tx, starting("m"), cost)
    apply_demand(tx, demand_of("n", key("b")))
    assert standing_of(tx.state, "n").tag_s == 98.0, "before the last start of the other"
    charge_start(tx, starting("n"), 5.0)
    apply_demand(tx, demand_of("n", key("b", 3)))
    assert standing_of(tx.state, "n").tag_s == 103.0, "it waited already"
    apply_demand(tx, demand_of("m", key("b"), key("a")))
    assert standing_of(tx.state, "m").tag_s == 100.0


def test_gateways_that_report_no_keys_are_one_key() -> None:
    w = World()
    w.model("m")
    w.send(DemandReceived(w.now, Demand(gateway="old", model="m", waiting=2), "w"))
    tx = Transaction(w.state.fork(), w.now, w.policy)
    charge_start(tx, starting("m"), 2.0)
    assert [(s.flow, s.tag_s) for s in tx.state.key_shares.values()] == [("", 2.0)]


def test_number_of_remembered_keys_is_bounded() -> None:
    w = World()
    w.model("m")
    tx = Transaction(w.state.fork(), w.now, w.policy)
    for n in range(3 * MAX_SHARES):
        tx.put(KeyShare(f"{n}", 0, float(n)))
    wait(w, {"m": [key("0")]})
    tx = Transaction(w.state.fork(), w.now, w.policy)
    for n in range(3 * MAX_SHARES):
        tx.put(KeyShare(f"{n}", 0, float(n)))
    for _ in range(3):
        charge_start(tx, starting("m"), 1.0)
    assert len(tx.state.key_shares) <= MAX_SHARES
    assert "0/0" in tx.state.key_shares, "it waits"


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    costs=st.lists(st.floats(0.1, 20.0), min_size=1, max_size=40),
)
def test_keys_that_always_wait_differ_by_one_start(weights: list[float], costs: list[float]) -> None:
    w = World()
    names = [f"m{n}" for n in range(len(weights))]
    for name in names:
        w.model(name)
    wait(w, {name: [key(name, weight=weight)] for name, weight in zip(names, weights, strict=True)})
    tx = Transaction(w.state.fork(), w.now, w.policy)
    received = dict.fromkeys(names, 0.0)
    for cost in costs:
        name = min(names, key=lambda m: (standing_of(tx.state, m).tag_s, m))
        charge_start(tx, starting(name), cost)
        received[name] += cost / weights[names.index(name)]
        assert max(received.values()) - min(received.values()) <= max(costs) / min(weights) + 1e-6


def test_requests_in_flight_protect_their_model_from_others_of_the_same_priority() -> None:
    """Batches wait for it, but it serves interactive requests, too."""
    w = World()
    for name in ("used", "other"):
        w.model(name)
    batch, chat = KeyDemand(flow="a", priority=-100, waiting=9), KeyDemand(flow="b", in_flight=1)
    wait(w, {"used": [batch, chat], "other": [key("c")]})
    tx = Transaction(w.state.fork(), w.now, w.policy)
    assert not may_interrupt(tx.state, standing_of(tx.state, "other"), "used", 0.0)
    assert standing_of(tx.state, "used").priority == -100, "only waiting requests count for its place"
    apply_demand(tx, demand_of("used", batch))
    assert may_interrupt(tx.state, standing_of(tx.state, "other"), "used", 0.0)


def compete(w: World, keys: dict[str, KeyDemand], seconds: float, ends_after: float) -> tuple[dict[str, float], float]:
    """Keep a request of each key on its own model all the time, on a device with room for one.

    A request that runs when its instance is drained is finished after `ends_after` seconds. Each
    waits again at once when its model is gone.

    Returns:
        The seconds for which each model served, and the longest wait.
    """
    served, longest, waited = dict.fromkeys(keys, 0.0), 0.0, dict.fromkeys(keys, 0.0)
    step = 0.25
    draining: dict[str, float] = {}
    ends = w.now + 4 * seconds
    while sum(served.values()) < seconds and w.now < ends:
        w.now += step
        for agent in w.agents.values():
            for r in agent.instances.values():
                model = r.command.card.name
                if r.state is InstanceState.LOADING:
                    r.state = InstanceState.READY
                name = r.command.instance_id
                draining[name] = draining.get(name, 0.0) + step if r.state is InstanceState.DRAINING else 0.0
                r.active = int(r.state is InstanceState.READY or 0 < draining[name] < ends_after)
                if r.state is InstanceState.READY:
                    served[model] += step
            agent.finish_stops()
        w.report()
        wanted = {m: [k] for m, k in keys.items() if not w.of(m, InstanceState.READY, InstanceState.DRAINING)}
        for model in keys:
            waited[model] = waited[model] + step if model in wanted else 0.0
        longest = max(longest, *waited.values())
        wait(w, wanted)
        for model in keys.keys() - wanted.keys():
            w.send(DemandReceived(w.now, Demand(gateway="g", model=model, waiting=0, in_flight=1), f"w-{model}"))
        w.tick(nodes_report=False)
    return served, longest


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_keys_whose_models_always_serve_take_turns_by_weight(weight: float) -> None:
    """Without shares each turn lasts until the other has waited `preempt_after_s`."""
    w = world("a", "b", preempt_after_s=10_000.0, starve_after_s=10_000.0)
    lasts_s = size(160.0, 320.0)
    served, longest = compete(w, {"a": key("a", weight=weight), "b": key("b")}, lasts_s, ends_after=0.5)
    assert served["a"] / served["b"] == pytest.approx(weight, rel=0.2)
    assert longest < lasts_s / 4, "several turns each"


@pytest.mark.parametrize("wakes", [False, True])
def test_replicas_and_wakes_without_requests_interrupt_no_key(*, wakes: bool) -> None:
    """A key that has received much serves; nothing has been charged for what waits."""
    w = world("used", preempt_after_s=10_000.0, starve_after_s=10_000.0)
    compete(w, {"used": key("a")}, 10.0, ends_after=0.5)
    w.model("other", replicas={"min": 0 if wakes else 1})
    if wakes:
        w.wake("other")
    compete(w, {"used": key("a")}, 30.0, ends_after=0.5)
    assert not w.stops("used")
    assert w.state.key_shares[share_key("a", 0)].tag_s > 10.0, "far ahead"


def test_models_of_one_key_do_not_interrupt_each_other() -> None:
    w = world("a", "b", preempt_after_s=10_000.0, starve_after_s=10_000.0)
    served, _ = compete(w, {"a": key("same"), "b": key("same")}, 60.0, ends_after=0.5)
    assert sorted(served.values())[0] == 0.0


def test_requests_of_a_higher_priority_interrupt_those_of_a_lower_one() -> None:
    w = world("batch", "chat", preempt_after_s=10_000.0, starve_after_s=10_000.0)
    compete(w, {"batch": key("a", priority=-100)}, 30.0, ends_after=0.5)
    served, _ = compete(w, {"batch": key("a", priority=-100), "chat": key("a")}, 30.0, ends_after=0.5)
    assert served["chat"] >= 25.0
    assert served["batch"] <= 5.0
