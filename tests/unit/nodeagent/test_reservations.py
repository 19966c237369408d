"""Reservations by priority and age, all or nothing over a device set.

Small ones overtake large ones, for a limited time.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.nodeagent.domain import events as e
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.reservations import PASSES, Reservation, grant
from services.nodeagent.domain.state import Process
from services.nodeagent.domain.status import instance_status
from shared.contracts.node import RESERVATION, InstanceState
from tests.unit.nodeagent.world import ERROR, World, resume, start, stop


def r(name: str, nbytes: int, *devices: str, priority: int = 0, since: float = 0.0) -> Reservation:
    return Reservation(name, devices or ("d0",), nbytes, priority, since, until=100.0)


def set_ledger(**held: int) -> Ledger:
    """Return devices of 100 bytes with so many booked."""
    ledger = Ledger({"d0": 100, "d1": 100})
    for device, nbytes in held.items():
        ledger = ledger.set_booking(f"held-{device}", (device,), nbytes)
    return ledger


def test_priority_precedes_age() -> None:
    chosen, _ = grant((r("old", 50), r("important", 50, priority=1, since=5.0)), set_ledger())
    assert chosen is not None
    assert chosen.instance_id == "important"


def test_device_set_is_granted_completely_or_not_at_all() -> None:
    chosen, left = grant((r("pair", 120, "d0", "d1"),), set_ledger(d1=50))
    assert chosen is None
    assert len(left) == 1
    chosen, _ = grant((r("pair", 120, "d0", "d1"),), set_ledger(d1=40))
    assert chosen is not None


def test_small_reservation_overtakes_a_large_one_a_limited_number_of_times() -> None:
    queue: tuple[Reservation, ...] = (r("large", 90),)
    for n in range(PASSES):
        chosen, queue = grant((*queue, r(f"small-{n}", 10, since=n + 1.0)), set_ledger(d0=50))
        assert chosen is not None
        assert chosen.instance_id == f"small-{n}"
    chosen, queue = grant((*queue, r("small-more", 10, since=50.0)), set_ledger(d0=50))
    assert chosen is None, "the large one has been passed often enough"
    chosen, _ = grant((*queue, r("elsewhere", 10, "d1", since=51.0)), set_ledger(d0=50))
    assert chosen is not None
    assert chosen.instance_id == "elsewhere", "only its own devices are kept for it"
    chosen, _ = grant(queue, set_ledger())
    assert chosen is not None
    assert chosen.instance_id == "large"


def test_bytes_of_other_devices_overtake_no_reservation() -> None:
    queue: tuple[Reservation, ...] = (r("large", 90),)
    for n in range(2 * PASSES):
        chosen, queue = grant((*queue, r(f"elsewhere-{n}", 10, "d1", since=n + 1.0)), set_ledger(d0=50))
        assert chosen is not None
    chosen, _ = grant((*queue, r("small", 10, since=50.0)), set_ledger(d0=50))
    assert chosen is not None
    assert chosen.instance_id == "small"


def test_high_priority_overtakes_low_priority_a_limited_number_of_times() -> None:
    queue: tuple[Reservation, ...] = (r("humble", 50),)
    for n in range(PASSES):
        chosen, queue = grant((*queue, r(f"great-{n}", 50, priority=9, since=n + 1.0)), set_ledger())
        assert chosen is not None
        assert chosen.instance_id == f"great-{n}"
    chosen, _ = grant((*queue, r("great-more", 50, priority=9, since=50.0)), set_ledger())
    assert chosen is not None
    assert chosen.instance_id == "humble"


waiting = st.lists(
    st.tuples(st.integers(1, 100), st.sampled_from([("d0",), ("d1",), ("d0", "d1")]), st.integers(-2, 2), st.floats(0, 50)),
    max_size=8,
)


@given(waiting, st.integers(0, 100), st.integers(0, 100))
def test_granted_reservations_fit_together(found: list[tuple[int, tuple[str, ...], int, float]], d0: int, d1: int) -> None:
    queue = tuple(r(f"i{n}", b, *d, priority=p, since=s) for n, (b, d, p, s) in enumerate(found))
    ledger = set_ledger(d0=d0, d1=d1)
    while True:
        chosen, rest = grant(queue, ledger)
        if chosen is None:
            break
        assert len(rest) == len(queue) - 1
        queue, ledger = rest, ledger.book(chosen.instance_id, chosen.device_ids, chosen.nbytes)
        assert all(ledger.sum_reserved(d) <= 100 for d in ("d0", "d1"))


# On a node.


def queued(w: World, name: str, reserve: int, wait_ms: int = 10_000, priority: int = 0) -> None:
    command = start(name, reserve=reserve).model_copy(update={"wait_ms": wait_ms, "priority": priority})
    w.receive(e.StartCommand(command, 50))


def leaves(w: World, name: str, pid: int) -> tuple[e.Effect, ...]:
    w.receive(e.StopCommand(stop(name), 60))
    w.receive(e.EngineExited(name, pid, 0, ERROR))
    w.receive(e.WeightsReleased(name, 1))
    return w.receive(e.MemoryFreed(name, 1))


def test_queued_start_is_forked_when_memory_is_free() -> None:
    w = World()
    w.ready("a", pid=1, reserve=60)
    queued(w, "b", 60)
    assert w["b"].process is Process.QUEUED
    assert w["b"].state is InstanceState.PREPARING
    assert e.Fork("b") not in w.effects
    assert e.Fork("b") in leaves(w, "a", 1)


def test_only_one_of_two_conflicting_starts_is_forked() -> None:
    w = World()
    w.ready("a", pid=1, reserve=60)
    queued(w, "b", 60)
    queued(w, "c", 60, priority=5)
    effects = leaves(w, "a", 1)
    assert e.Fork("c") in effects
    assert e.Fork("b") not in effects
    assert w.state.ledger.sum_reserved("cpu:0") == 60


def test_queued_reservation_fails_at_its_deadline() -> None:
    w = World()
    w.ready("a", pid=1, reserve=60)
    queued(w, "b", 60, wait_ms=1000)
    w.receive(e.Tick(), 1.0)
    error = w["b"].error
    assert error is not None
    assert (error.code, error.param, error.should_retry) == ("insufficient_memory", RESERVATION, True)
    assert w.state.queue == ()
    w.receive(e.WeightsReleased("b", 0))
    w.receive(e.MemoryFreed("b", 0))
    assert w["b"].state is InstanceState.FAILED


def test_queued_start_is_cancelled_immediately() -> None:
    w = World()
    w.ready("a", pid=1, reserve=60)
    queued(w, "b", 60)
    w.receive(e.StopCommand(stop("b"), 61))
    w.receive(e.WeightsReleased("b", 0))
    w.receive(e.MemoryFreed("b", 0))
    assert w["b"].state is InstanceState.STOPPED
    assert w.state.queue == ()


def test_immediate_starts_overtake_a_queued_one_a_limited_number_of_times() -> None:
    w = World()
    w.ready("a", pid=100, reserve=60)
    queued(w, "large", 90)
    for n in range(PASSES):
        w.receive(e.StartCommand(start(f"s{n}", reserve=1), 70))
        assert f"s{n}" in w.state.instances
    w.receive(e.StartCommand(start("more", reserve=1), 71))
    assert "more" not in w.state.instances


def test_suspended_instance_needs_only_the_difference_to_its_reservation() -> None:
    w = World()
    w.suspended("a", pid=1, left=40, reserve=60)
    queue = (replace(r("a", 60, "cpu:0")),)
    chosen, _ = grant(queue, w.state.ledger.set_booking("b", ("cpu:0",), 40))
    assert chosen is not None, "what it has left is part of what it needs"


def test_resume_whose_grant_timed_out_stays_suspended_with_an_error() -> None:
    w = World()
    w.suspended("a", pid=1, left=8, reserve=60)
    w.ready("b", pid=2, reserve=60)
    w.receive(e.ResumeCommand(resume("a", wait_ms=1000), 70))
    w.receive(e.Tick(), 1.0)
    reported = instance_status(w.state, w["a"], 0, 0, (), 0.0)
    assert reported.state is InstanceState.SUSPENDED
    assert reported.error is not None
    assert (reported.error.param, reported.error.should_retry) == (RESERVATION, True)
    assert reported.token == w["a"].token, "of the command that it answers"
    w.receive(e.ResumeCommand(resume("a", wait_ms=1000), 71))
    assert instance_status(w.state, w["a"], 0, 0, (), 0.0).error is None
