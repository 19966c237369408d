"""The loader's decisions: holders of weights, runs of loads, order of replies."""

from __future__ import annotations

from services.loader.domain.effects import (
    Accepted,
    Attached,
    CancelRun,
    Freed,
    Grant,
    RaisePriority,
    Refused,
    StartRun,
    Vacate,
    WriteRecord,
)
from services.loader.domain.events import (
    Abandoned,
    Adopt,
    Attach,
    Completed,
    Ended,
    Failed,
    Fetched,
    Indexed,
    LaidOut,
    NodeReported,
    Prepare,
    Progressed,
    Reclaimed,
    Release,
    Stop,
    Vacated,
)
from services.loader.domain.lifecycle import LOST_AFTER_S, MISSING_FOR_S
from services.loader.domain.state import State
from tests.unit.loader.played import ERROR, VACATE, Played, card, granted, loaded
from weights.pool.chunks import Chunks


def test_concurrent_prepares_start_one_load() -> None:
    p = Played()
    assert p.do(Prepare(1, "a", card(), 1)) == (StartRun("w1", 1, card()), Accepted(1))
    assert p.do(Prepare(2, "a", card(), 1)) == (Accepted(2),)
    assert p.do(Prepare(3, "b", card(), 1)) == (Accepted(3),)


def test_attach_is_answered_when_its_condition_is_met() -> None:
    p = Played()
    p.do(Attach(1, "a", card(), "index"))
    p.do(Attach(2, "a", card(), "complete"))
    assert p.do(LaidOut("w1", 1, 100, 1000)) == (Grant(1, (0,)),)
    assert p.do(Indexed("w1", 1, "/m", 100)) == (Attached(1, "w1"),)
    assert p.do(Attach(3, "b", card(), "index")) == (Attached(3, "w1"),)
    assert p.do(Progressed("w1", 1, 50)) == ()
    assert p.do(Completed("w1", 1)) == (WriteRecord("w1"), Attached(2, "w1"))


def test_weights_are_loaded_when_their_run_has_ended() -> None:
    """A reader that saw the last byte earlier would release its hold, and cancel the run."""
    p = Played()
    p.do(Attach(1, "a", card(), "index"))
    p.do(LaidOut("w1", 1, 100, 1000))
    p.do(Indexed("w1", 1, "/m", 100))
    p.do(Progressed("w1", 1, 100))
    assert p.state.entries["w1"].loaded_bytes < 100
    p.do(Completed("w1", 1))
    assert p.state.entries["w1"].loaded_bytes == 100


def test_bytes_that_arrived_after_the_last_report_are_counted_as_fetched() -> None:
    p = Played()
    p.do(Attach(1, "a", card(), "index"))
    p.do(LaidOut("w1", 1, 100, 1000))
    p.do(Indexed("w1", 1, "/m", 100))
    p.do(Fetched("w1", 1, 60))
    p.do(Completed("w1", 1))
    assert p.state.entries["w1"].fetched_bytes == 100


def test_bytes_that_a_device_had_count_as_fetched_once_a_load_of_the_others_has_ended() -> None:
    """The scheduler takes the rest of the bytes for those that are still to be fetched."""
    p = Played()
    p.do(Attach(1, "a", card(), "index", device="cuda:0"))
    p.do(LaidOut("w1", 1, 100, 1000, {"cuda:0": 40}))
    p.do(Indexed("w1", 1, "/m", 100))
    p.do(Fetched("w1", 1, 40))
    p.do(Completed("w1", 1, kept_bytes=10))
    [entry] = p.state.entries.values()
    assert (entry.loaded_bytes, entry.fetched_bytes) == (10, 100)


def test_failure_is_sent_to_waiters_and_to_holders_that_attach_later() -> None:
    p = Played()
    p.do(Prepare(1, "late", card(), 1))
    p.do(Attach(2, "a", card(), "index"))
    assert p.do(Failed("w1", 1, ERROR)) == (Refused(2, ERROR),)
    assert p.do(Attach(3, "late", card(), "complete")) == (Refused(3, ERROR),)
    assert p.do(Attach(4, "new", card(), "complete")) == (StartRun("w1", 2, card()),)


def test_events_of_an_ended_run_are_ignored() -> None:
    failed = Played()
    failed.do(Attach(1, "a", card(), "index"))
    failed.do(Failed("w1", 1, ERROR))
    complete = loaded("a")
    for p in (failed, complete):
        before = p.state
        for late in (Completed("w1", 1), Progressed("w1", 1, 50), Ended("w1", 1), Reclaimed("w1", 1, 1)):
            assert p.do(late) == ()
        assert p.state == before


def test_failed_weights_are_forgotten_with_their_last_holder() -> None:
    p = Played()
    p.do(Prepare(1, "a", card(), 1))
    p.do(Failed("w1", 1, ERROR))
    assert p.do(Release(2, "a")) == (Freed(2, 0),)
    assert p.state.entries == {}


def test_last_release_cancels_a_load_and_waits_for_its_end() -> None:
    p = Played()
    p.do(Prepare(1, "a", card(), 1))
    p.do(Attach(2, "a", card(), "complete"))
    refused, cancel = p.do(Release(3, "a"))
    assert isinstance(refused, Refused)
    assert cancel == CancelRun("w1", 1)
    assert p.do(Release(4, "a")) == ()  # repeated: waits as well
    assert p.do(Ended("w1", 1)) == (Freed(3, 0), Freed(4, 0))
    assert p.state.entries == {}


def test_load_that_completes_during_cancellation_is_removed() -> None:
    p = Played()
    p.do(Prepare(1, "a", card(), 1))
    granted(p)
    p.do(Release(2, "a"))
    assert p.do(Completed("w1", 1)) == VACATE[1:]
    assert p.do(Vacated(1, 1000)) == ()
    assert p.do(Reclaimed("w1", 1, 100)) == (Freed(2, 100),)


def test_an_attach_during_an_eviction_gets_a_new_load() -> None:
    p = loaded("a")
    assert p.do(Release(5, "a")) == VACATE
    assert p.do(Attach(6, "b", card(), "index")) == ()
    assert p.do(Reclaimed("w1", 1, 100)) == (Freed(5, 100), StartRun("w1", 2, card()))
    assert p.do(Indexed("w1", 1, "/m", 100)) == ()
    # The old chunks are not reassigned before proof that no process maps them.
    assert p.do(LaidOut("w1", 2, 100, 1000)) == (Grant(2, (1,)),)
    assert p.do(Indexed("w1", 2, "/m", 100)) == (Attached(6, "w1"),)


def test_remaining_holder_keeps_the_segment() -> None:
    p = loaded("a", "b")
    assert p.do(Release(5, "a")) == (WriteRecord("w1"), Freed(5, 0))
    assert p.state.entries["w1"].holders.keys() == {"b"}


def test_abandoned_attach_is_not_answered_but_holds_the_weights() -> None:
    p = Played()
    p.do(Attach(1, "a", card(), "complete"))
    p.do(Abandoned(1))
    granted(p)
    assert p.do(Completed("w1", 1)) == (WriteRecord("w1"),)
    assert "a" in p.state.entries["w1"].holders


def test_holders_missing_from_the_nodeagent_are_released() -> None:
    p = loaded("a", "b")
    p.now = 1.0
    p.do(NodeReported(frozenset({"b"})))
    p.now = LOST_AFTER_S + 0.1
    assert p.do(NodeReported(frozenset({"b"}))) == (WriteRecord("w1"),)
    p.do(NodeReported(frozenset()))
    p.do(NodeReported(frozenset({"b"})))  # it was there all the time
    p.now += MISSING_FOR_S + 1
    assert p.do(NodeReported(frozenset())) == ()
    p.now += MISSING_FOR_S
    assert p.do(NodeReported(frozenset())) == VACATE


def test_simultaneously_lost_holders_are_all_released() -> None:
    p = loaded("a", "b")
    p.now = 100.0
    assert p.do(NodeReported(frozenset())) == ()
    p.now = 200.0
    assert p.do(NodeReported(frozenset())) == VACATE


def test_new_holder_is_not_lost_immediately() -> None:
    p = loaded("a")
    for p.now in (1.0, 5.0, LOST_AFTER_S):
        assert p.do(NodeReported(frozenset())) == ()


def test_adopted_segment_can_be_attached_immediately() -> None:
    p = Played()
    p.do(Adopt("w1", "m", (3,), "/m", 100, ("a",)))
    assert p.do(Attach(1, "b", card(), "complete")) == (WriteRecord("w1"), Attached(1, "w1"))


def test_stop_keeps_complete_weights() -> None:
    p = loaded("a")
    p.do(Attach(5, "b", card("w2"), "complete"))
    refused, cancel = p.do(Stop())
    assert isinstance(refused, Refused)
    assert cancel == CancelRun("w2", 2)
    settled = [p.state.settled]
    p.do(Ended("w2", 2))
    assert [*settled, p.state.settled] == [False, True]
    assert p.state.entries.keys() == {"w1"}
    [refused] = p.do(Prepare(6, "c", card(), 1))
    assert isinstance(refused, Refused)


def test_a_background_load_hurries_for_a_request() -> None:
    p = Played()
    start, _ = p.do(Prepare(1, "a", card(), 1, background=True))
    assert isinstance(start, StartRun)
    assert start.background
    assert p.do(Attach(2, "a", card(), "complete")) == ()  # its own engine: no other process waits
    assert p.do(Prepare(3, "b", card(), 1)) == (RaisePriority(1), Accepted(3))
    assert p.do(Prepare(4, "c", card(), 1)) == (Accepted(4),)


def test_a_connection_is_not_for_the_nodeagent_to_know() -> None:
    p = Played()
    p.do(Attach(1, "socket", card(), "complete", local=True))
    granted(p)
    p.do(Completed("w1", 1))
    for p.now in (100.0, 200.0):
        assert p.do(NodeReported(frozenset())) == ()
    assert p.do(Release(2, "socket")) == VACATE


def test_adapters_are_released_with_their_instance() -> None:
    p = loaded("a")
    p.do(Attach(5, "a+lora", card("w2"), "complete"))
    granted(p, "w2", 2)
    p.do(Completed("w2", 2))
    p.now = 100.0
    for p.now in (100.0, 200.0):
        assert p.do(NodeReported(frozenset({"a"}))) == ()
    effects = p.do(Release(6, "a"))
    assert [e.run for e in effects if isinstance(e, Vacate)] == [2, 1]
    [refused] = p.do(Attach(7, "a+other", card("w3"), "index"))
    assert isinstance(refused, Refused)


def test_adapters_that_are_evicted_for_their_instance_s_weights_are_not_recorded() -> None:
    p = Played(State(chunks=Chunks(64, budget=150)))
    p.do(Prepare(1, "a", card(pin=True), 1))
    granted(p)
    p.do(Completed("w1", 1))
    p.do(Attach(2, "a+lora", card("w2"), "complete"))
    granted(p, "w2", 2)
    p.do(Completed("w2", 2))
    effects = p.do(Release(3, "a"))
    assert set(p.state.entries) == {"w1"}
    assert [e.key for e in effects if isinstance(e, WriteRecord)] == ["w1"]
    assert [e.run for e in effects if isinstance(e, Vacate)] == [2]
    assert effects[-1] == Freed(3, 0, 100)


def test_a_load_after_an_eviction_has_the_priority_of_the_request_that_waits_for_it() -> None:
    p = loaded("a")
    assert p.do(Release(5, "a")) == VACATE
    p.do(Attach(6, "prefetch", card(), "complete", local=True, background=True))
    p.do(Attach(7, "b", card(), "index"))
    p.do(Attach(8, "other", card(), "complete", local=True, background=True))
    _, start = p.do(Reclaimed("w1", 1, 100))
    assert isinstance(start, StartRun)
    assert not start.background
