"""Counts of arrivals for the scheduler's autoscaler."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.domain.arrivals import WINDOWS, Arrivals
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.ticket import Ticket
from shared.contracts.demand import ARRIVALS_WINDOW_S
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket


def arrivals_at(*times: float) -> Arrivals:
    found = Arrivals()
    for at in times:
        found.record(at)
    return found


def test_arrival_window_slides_and_peak_expires() -> None:
    arrivals = arrivals_at(10.1, 10.2, 10.9, 11.0)
    assert (arrivals.window(11.05), arrivals.peak(11.05)) == (4, 3)
    assert (arrivals.window(11.95), arrivals.peak(11.95)) == (1, 3)
    assert (arrivals.window(12.5), arrivals.peak(12.5)) == (0, 3)
    assert arrivals.peak(10.0 + (WINDOWS + 0.5) * ARRIVALS_WINDOW_S) == 3
    assert arrivals.peak(10.0 + (WINDOWS + 1.5) * ARRIVALS_WINDOW_S) == 1
    assert arrivals.is_idle(30.0)


@given(st.lists(st.floats(0.0, 3.0), max_size=60), st.floats(0.0, 20.0))
def test_arrival_counts_match_a_full_history(distances: list[float], after: float) -> None:
    times, now = [], 5.0
    for distance in distances:
        now += distance
        times.append(now)
    arrivals, now = arrivals_at(*times), now + after
    assert arrivals.window(now) == sum(t > now - ARRIVALS_WINDOW_S for t in times)
    present = int(now // ARRIVALS_WINDOW_S)
    whole = [int(t // ARRIVALS_WINDOW_S) for t in times]
    assert arrivals.peak(now) == max([whole.count(n) for n in range(present - WINDOWS, present)])


def test_demand_counts_requests_served_immediately() -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    dispatcher.on_status(status(instance("i", capacity=1)), 0.0)
    for n in range(3):
        dispatcher.on_request(ticket(f"r{n}", now=100.0), 10, 100.0)
    (demand,) = world.demands
    assert (demand.waiting, demand.in_flight, demand.window) == (1, 2, 3)
    dispatcher.on_tick(101.5)
    assert (world.demands[-1].window, world.demands[-1].peak) == (0, 3)
    for n in range(3):
        dispatcher.on_cancel(ticket_of(dispatcher, f"r{n}"), 102.0)
    dispatcher.on_tick(200.0)
    assert not dispatcher._arrivals


def ticket_of(dispatcher: Dispatcher, name: str) -> Ticket:
    held = {**dispatcher._sent, **{k: t for q in dispatcher._queues.values() for k, t in q.waiting.items()}}
    return held[name]
