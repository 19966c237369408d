"""Idle instances between two requests, in the fair shares of the keys (ADR 0099)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.domain.demand.key_shares import (
    FORGET_S,
    KEPT_LEAST_S,
    KEPT_MOST_S,
    TURN_S,
    charge_use,
    has_other_users,
    is_in_use,
    is_shielded,
    kept_s,
    standing_of,
)
from services.scheduler.domain.effects import Effect, SendStart
from services.scheduler.domain.placement import place as place_module
from services.scheduler.domain.placement import victims as victims_module
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import (
    GatewayDemand,
    KeyShare,
    ModelDemand,
    ModelUsers,
    Unschedulable,
    share_key,
)
from services.scheduler.domain.values import replace
from shared.contracts.demand import KeyDemand
from shared.contracts.node import InstanceState
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.placement.key_demand import ONE, key, starting, wait, world
from tests.unit.scheduler.world import World

TWO = 2 * ONE
STEP_S = 0.1


@dataclass
class Client:
    """Sends one request after another, with pauses of `gap_s` between them."""

    model: str
    key: KeyDemand
    service_s: float = 0.3
    gap_s: float = 0.1
    state: str = "gap"
    until: float = 0.0
    waiting_since: float = 0.0
    served: int = 0
    longest_wait_s: float = 0.0


@dataclass
class Traffic:
    """Clients of a world, whose instances take `start_s` to start."""

    w: World
    clients: Sequence[Client]
    start_s: float = 0.5
    started: dict[str, float] = field(default_factory=dict)
    load: list[tuple[str, InstanceState, int]] = field(default_factory=list)
    demand: dict[str, list[KeyDemand]] = field(default_factory=dict)

    def run(self, seconds: float) -> None:
        ends = self.w.now + seconds
        steps = 0
        while self.w.now < ends:
            self.w.now += STEP_S
            steps += 1
            self._advance()
            self._report_load(every=steps % 10 == 0)
            self._report_demand(every=steps % 10 == 0)
            if steps % 4 == 0:
                self.w.tick(nodes_report=False)

    def _advance(self) -> None:
        instances = [r for agent in self.w.agents.values() for r in agent.instances.values()]
        for r in instances:
            began = self.started.setdefault(r.command.instance_id, self.w.now)
            if r.state is InstanceState.LOADING and self.w.now >= began + self.start_s:
                r.state, r.idle_since = InstanceState.READY, self.w.now
        ready = {r.command.card.name: r for r in instances if r.state is InstanceState.READY}
        for client in self.clients:
            self._advance_client(client, ready.get(client.model))
        for r in instances:
            active = sum(1 for c in self.clients if c.state == "running" and c.model == r.command.card.name)
            if r.active and not active:
                r.idle_since = self.w.now
            r.active = active if r.state in (InstanceState.READY, InstanceState.DRAINING) else 0
        for agent in self.w.agents.values():
            agent.finish_stops()

    def _advance_client(self, client: Client, instance: Running | None) -> None:
        if client.state == "running" and self.w.now >= client.until:
            client.served += 1
            client.state, client.until = "gap", self.w.now + client.gap_s
            if instance is not None:
                instance.completed += 1
        if client.state == "gap" and self.w.now >= client.until:
            client.state, client.waiting_since = "waiting", self.w.now
        if client.state == "waiting":
            client.longest_wait_s = max(client.longest_wait_s, self.w.now - client.waiting_since)
            if instance is not None:
                client.state, client.until = "running", self.w.now + client.service_s

    def _report_load(self, *, every: bool) -> None:
        load = [(r.command.instance_id, r.state, r.active) for agent in self.w.agents.values() for r in agent.instances.values()]
        if every or load != self.load:
            self.w.report()
        self.load = load

    def _report_demand(self, *, every: bool) -> None:
        waiting: dict[str, list[KeyDemand]] = {}
        for c in self.clients:
            if c.state == "waiting":
                waiting.setdefault(c.model, []).append(c.key)
        changed = {m: keys for m, keys in waiting.items() if every or self.demand.get(m) != keys}
        if changed:
            wait(self.w, changed)
        for model in sorted(self.demand.keys() - waiting.keys()):
            self.w.demand(model, 0, gateway="g")
        self.demand = waiting


def clients_of_a_flood(models: int = 5, flow: str = "a") -> list[Client]:
    """Two clients for each of several models; their pauses overlap now and then."""
    return [Client(f"{flow}{n}", key(flow), 0.4 + 0.1 * half, 0.1 + 0.1 * half) for n in range(models) for half in range(2)]


def served(clients: Sequence[Client], flow: str) -> float:
    return sum(c.served * c.service_s for c in clients if c.key.flow == flow)


def test_sequential_client_keeps_its_model_beside_a_flood_of_another_key() -> None:
    """Without the protection it pays for a start with every response, as the one key does here."""
    shares, one_key = [0, 0], [0, 0]
    for flow, result in (("b", shares), ("a", one_key)):
        clients = [*clients_of_a_flood(), Client("other", key(flow))]
        w = world("other", *(f"a{n}" for n in range(5)))
        w.node("n", TWO)
        Traffic(w, clients).run(30.0)
        result[:] = [clients[-1].served, sum(c.served for c in clients[:-1])]
    most = 30.0 / (0.3 + 0.1)  # alone
    assert shares[0] >= 0.8 * most, "its model takes half of the memory"
    assert one_key[0] < 0.5 * most
    assert sum(shares) >= 0.9 * sum(one_key)


def test_two_sequential_clients_take_turns_of_several_restarts() -> None:
    """Per request the memory would change hands 60 times."""
    clients = [Client("a", key("a")), Client("b", key("b"))]
    w = world("a", "b")
    Traffic(w, clients).run(50.0)
    starts = len([e for e in w.effects if isinstance(e, SendStart)])
    assert 4 <= starts <= 20
    assert served(clients, "a") == pytest.approx(served(clients, "b"), rel=0.25)
    assert max(c.longest_wait_s for c in clients) < w.policy.preempt_after_s
    assert served(clients, "a") + served(clients, "b") >= 0.5 * 50.0 * 0.3 / 0.4


def test_client_that_pauses_for_longer_than_a_restart_does_not_keep_memory() -> None:
    clients = [Client("a", key("a"), gap_s=4.0), Client("b", key("b"), gap_s=4.0)]
    w = world("a", "b")
    Traffic(w, clients).run(60.0)
    assert max(c.longest_wait_s for c in clients) < 3.0, "the other's request, the time it is kept, and the start"


def used_just_now(ahead_s: float, used_by: KeyDemand, *, idle_s: float = 0.2, start_s: float = 1.0) -> World:
    """Return a full device whose only model a key that is so far ahead has used `idle_s` ago."""
    w = world("used", "new")
    wait(w, {"used": [used_by]})
    (r,) = w.agents["n"].instances.values()
    w.now += start_s
    r.state, r.active = InstanceState.READY, 1
    w.report()
    w.demand("used", 0, gateway="g")
    w.now += 10.0
    r.active, r.completed, r.idle_since = 0, 5, w.now
    w.now += idle_s
    apply(w.state, [Put(KeyShare(used_by.flow, used_by.priority, 100.0 + ahead_s)), Put(KeyShare("b", 0, 100.0))])
    w.report()
    return w


def test_model_of_a_key_that_has_received_no_more_is_kept_and_explained() -> None:
    w = used_just_now(0.0, key("a"))
    wait(w, {"new": [key("b")]})
    assert not w.stops("used")
    assert "between two requests of another key, which has not received more" in w.state.unschedulable["new"].reason


@pytest.mark.parametrize(
    ("ahead_s", "used_by", "idle_s", "why"),
    [
        (TURN_S, key("a"), 0.2, "its key is ahead"),
        (-50.0, key("a"), 1.1, "it is idle for longer than its start took"),
        (-50.0, key("a", priority=-1), 0.2, "requests of a higher priority wait"),
        (-50.0, key("b"), 0.2, "it is of the same key"),
    ],
)
def test_idle_model_leaves_at_once(ahead_s: float, used_by: KeyDemand, idle_s: float, why: str) -> None:
    w = used_just_now(ahead_s, used_by, idle_s=idle_s)
    wait(w, {"new": [key("b")]})
    assert w.stops("used"), why


def test_requests_of_a_lower_priority_wait_for_the_pause() -> None:
    w = used_just_now(500.0, key("a"))
    wait(w, {"new": [key("b", priority=-100)]})
    assert not w.stops("used"), "whatever its key has received"
    w.now += 1.0
    w.tick()
    assert w.stops("used")


def test_key_with_a_waiting_model_of_its_own_keeps_no_idle_one_from_a_key_with_less() -> None:
    w = used_just_now(0.5, key("a"))
    w.model("more")
    wait(w, {"new": [key("b")]})
    assert not w.stops("used")
    w.now += 0.1
    wait(w, {"more": [key("a")], "new": [key("b")]})
    assert [stop.command.reason for stop in w.stops("used")] == ["makes room for new"], "its key has received less"


def test_wakes_take_idle_models_as_before() -> None:
    w = used_just_now(0.0, key("a"))
    w.wake("new")
    assert w.stops("used")


@pytest.mark.parametrize("has_turns", [True, False])
def test_after_a_long_wait_shares_keep_instances_only_where_its_key_has_turns(*, has_turns: bool) -> None:
    """The device has another instance of the waiting key, which leaves for it; or it has none."""
    clients = [Client("other", key("b", priority=1))]
    clients += [Client("own", key("a"), 0.9, 0.0), Client("new", key("a"), 0.9, 0.0)] if has_turns else []
    w = world("own", "new", "other", preempt_after_s=4.0)
    w.node("n", TWO if has_turns else ONE)
    traffic = Traffic(w, clients)
    traffic.run(2.0)
    if not has_turns:
        traffic.clients = [*clients, Client("new", key("a"))]
    traffic.run(3.5)
    assert not w.stops("other"), "its requests have a higher priority"
    traffic.run(12.0)
    assert len(w.starts("new")) >= 1
    assert bool(w.stops("other")) is not has_turns


def test_many_models_of_a_key_that_wait_for_long_take_turns_in_its_own_memory() -> None:
    clients = [*[Client(f"a{n}", key("a"), 0.5, 0.0) for n in range(5)], Client("other", key("b"))]
    w = world("other", *(f"a{n}" for n in range(5)), preempt_after_s=3.0, starve_after_s=6.0)
    w.node("n", TWO)
    traffic = Traffic(w, clients)
    traffic.run(10.0)
    before = len(w.stops("other"))
    traffic.run(20.0)
    assert len(w.stops("other")) == before, "although each of the other key's models has waited for long"
    assert all(len(w.starts(f"a{n}")) >= 2 for n in range(5))


def test_time_in_use_is_charged_with_its_pauses() -> None:
    w = used_just_now(0.0, key("a"), idle_s=0.2)
    tx = Transaction(w.state.fork(), w.now, w.policy)
    tx.put(Unschedulable("new", w.now))
    charge_use(tx)
    before = tx.state.key_shares[share_key("a", 0)].tag_s
    for now in (w.now + 0.5, w.now + 1.5):
        tx.now = now
        charge_use(tx)
        assert tx.state.key_shares[share_key("a", 0)].tag_s - before == pytest.approx(0.5 * 324 / 400, rel=0.1)


def test_tags_of_a_time_without_waiting_models_are_forgotten() -> None:
    w = used_just_now(300.0, key("a"))
    tx = Transaction(w.state.fork(), w.now, w.policy)
    tx.put(Unschedulable("new", w.now))
    charge_use(tx)
    assert tags_of(tx) == {"a": TURN_S, "b": TURN_S}, "one that begins to wait goes first"
    tx.put(KeyShare("b", 0, 50.0))
    tx.drop(Unschedulable, "new")
    charge_use(tx)
    tx.now += FORGET_S - 1
    tx.put(Unschedulable("new", tx.now))
    charge_use(tx)
    assert tags_of(tx) == {"a": TURN_S, "b": 50.0}, "the time was short"


def tags_of(tx: Transaction) -> dict[str, float]:
    return {share.flow: share.tag_s for share in tx.state.key_shares.values()}


@given(took=st.floats(0.0, 1000.0), idle=st.floats(0.0, 20.0))
def test_time_in_use_is_bounded(took: float, idle: float) -> None:
    i = replace(starting("m"), sent_at=5.0, ready_at=5.0 + took, state=InstanceState.READY)
    assert KEPT_LEAST_S <= kept_s(i) <= KEPT_MOST_S
    assert is_in_use(i, None, 10.0)
    assert is_in_use(i, 10.0, 10.0 + idle) == (idle < kept_s(i)) or idle == pytest.approx(kept_s(i))


flows = st.frozensets(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1])), min_size=1)
tags = st.dictionaries(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1])), st.floats(0.0, 50.0))


@given(users=flows, waiting=flows, tags=tags, reload_s=st.floats(0.0, 10.0), is_idle=st.booleans())
def test_shares_keep_a_model_from_other_keys_only_until_its_users_are_ahead(
    users: frozenset[tuple[str, int]],
    waiting: frozenset[tuple[str, int]],
    tags: dict[tuple[str, int], float],
    reload_s: float,
    *,
    is_idle: bool,
) -> None:
    w = World()
    w.model("m")
    w.model("v")
    tx = Transaction(w.state.fork(), w.now, w.policy)
    for (flow, priority), tag_s in tags.items():
        tx.put(KeyShare(flow, priority, tag_s))
    tx.put(ModelUsers("v", tuple(KeyDemand(flow=f, priority=p, in_flight=1) for f, p in sorted(users))))
    wait_keys = tuple(KeyDemand(flow=f, priority=p, waiting=1) for f, p in sorted(waiting))
    tx.put(ModelDemand("m", (GatewayDemand("g", len(wait_keys), 0, w.now, w.now, keys=wait_keys),)))
    standing = standing_of(tx.state, "m")
    shielded = is_shielded(tx, standing, "v", reload_s, is_idle=is_idle)
    if users <= waiting:
        assert not shielded
    if shielded:
        assert has_other_users(tx, standing), "or the last resort would not be tried"
        for flow, priority in users:
            tx.put(KeyShare(flow, priority, standing.tag_s + TURN_S + 10 * reload_s + 1))
        higher = max(p for _, p in users - waiting) > standing.priority
        assert is_shielded(tx, standing_of(tx.state, "m"), "v", reload_s, is_idle=is_idle) is higher or users & waiting


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_with_one_key_every_decision_is_that_without_shares_of_idle_models(data: st.DataObject) -> None:
    names = [f"m{n}" for n in range(data.draw(st.integers(2, 4)))]
    flow = data.draw(st.sampled_from(["", "a"]))
    clients = [
        (name, data.draw(st.sampled_from([0.2, 0.5, 3.0])), data.draw(st.sampled_from([0.1, 0.3, 2.0])))
        for name in names
        for _ in range(data.draw(st.integers(1, 2)))
    ]
    rooms = data.draw(st.integers(1, 2))

    def run() -> list[Effect]:
        w = World(policy=Policy(preempt_after_s=2.0, starve_after_s=3.0))
        w.node("n", rooms * ONE)
        for name in names:
            w.model(name)
        Traffic(w, [Client(name, key(flow), service_s, gap_s) for name, service_s, gap_s in clients]).run(6.0)
        return w.effects

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(victims_module, "is_shielded", lambda *_, **__: False)
        patched.setattr(place_module, "has_other_users", lambda *_: False)
        expected = run()
    assert run() == expected
