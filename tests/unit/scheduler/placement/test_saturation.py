"""A model that no device has room for waits without a look at every device."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.scheduler.domain.demand.reports import apply_demand
from services.scheduler.domain.events import DemandReceived
from services.scheduler.domain.placement import place as place_module
from services.scheduler.domain.placement.options import open_for
from services.scheduler.domain.placement.place import Placement, place
from services.scheduler.domain.placement.shortlist import SHORTLIST_SIZE
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import KeyShare, ModelUsers
from shared.contracts.demand import Demand, KeyDemand
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

MANY = 13
"""More than are examined in any case."""
ONE = 400 * MIB
"""Room for one model of 324 MiB."""


@dataclass(frozen=True)
class Resident:
    """The model of a device, and who uses it."""

    serves: bool = True
    is_pinned: bool = False
    priority: int = 0
    has_replica: bool = False
    key: str = "a"


RESIDENTS = st.builds(
    Resident,
    serves=st.sampled_from((True, True, True, False)),
    is_pinned=st.booleans(),
    priority=st.integers(0, 1),
    has_replica=st.sampled_from((False, False, True)),
    key=st.sampled_from("ab"),
)


def cluster(residents: list[Resident], spare: int = 0) -> World:
    """Return one device for each instance, and `spare` devices of half their size."""
    w = World()
    for n in range(sum(1 + r.has_replica for r in residents)):
        w.node(f"n{n:02}", ONE)
    for n in range(spare):
        w.node(f"s{n}", ONE // 2)
    options = [{"keep_alive": -1, "pin": r.is_pinned, "priority": r.priority} for r in residents]
    for n, r in enumerate(residents):
        w.model(f"m{n:02}", replicas={"min": 1 + r.has_replica, "max": 2}, **options[n])
    w.tick()
    w.get_ready()
    for n in range(len(residents)):
        w.model(f"m{n:02}", replicas={"min": 0, "max": 2}, **options[n])
    for agent in w.agents.values():
        for running in agent.instances.values():
            running.completed, running.active = 1, int(residents[int(running.command.card.name[1:])].serves)
    w.model("new")
    w.tick(30)
    return w


def decide(w: World, waited: float, residents: list[Resident], shares: dict[str, float], *, extra: bool = False) -> Placement:
    tx = Transaction(w.state.fork(), w.now, w.policy)
    for flow, tag in shares.items():
        tx.put(KeyShare(flow, 0, tag))
    for n, r in enumerate(residents):
        tx.put(ModelUsers(f"m{n:02}", (KeyDemand(flow=r.key, waiting=0, in_flight=1),)))
    apply_demand(
        tx, DemandReceived(w.now, Demand(gateway="g", model="new", waiting=1, keys=(KeyDemand(flow="b", waiting=1),)), "w")
    )
    return place(tx, w.state.models["new"], waited, extra=extra)


@settings(max_examples=15)
@example(Resident(key="b"), [Resident(key="a")], 0, 5.0, {"a": 50.0, "b": 0.0}, False)  # one has received more
@example(Resident(), [Resident(has_replica=True)], 0, 5.0, {"a": 0.0, "b": 0.0}, False)  # one's requests may migrate
@given(
    RESIDENTS,
    st.lists(RESIDENTS, min_size=1, max_size=2),
    st.integers(0, 1),
    st.sampled_from((0.0, 5.0, 20.0)),
    st.fixed_dictionaries({"a": st.sampled_from((0.0, 50.0)), "b": st.sampled_from((0.0, 50.0))}),
    st.booleans(),
)
def test_the_decision_is_that_of_examining_every_device(
    usual: Resident, last: list[Resident], spare: int, waited: float, shares: dict[str, float], extra: bool
) -> None:
    residents = [usual] * MANY + last
    w = cluster(residents, spare)
    found = decide(w, waited, residents, shares, extra=extra)
    with mock.patch.object(place_module, "no_device_gets_room", return_value=False):
        assert found == decide(w, waited, residents, shares, extra=extra)


def test_of_many_devices_that_all_serve_few_are_examined() -> None:
    residents = [Resident()] * MANY
    w = cluster(residents)
    with mock.patch("services.scheduler.domain.placement.options.open_for", wraps=open_for) as examined:
        found = decide(w, 0.0, residents, {})
    assert found.way == "wait"
    assert SHORTLIST_SIZE <= examined.call_count < MANY
