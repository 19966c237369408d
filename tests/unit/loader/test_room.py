"""Memory: cached weights, eviction for new ones, and waiting loads."""

from __future__ import annotations

from services.loader.domain.effects import Attached, Deny, Freed, Grant, Refused, RemoveRecord, Vacate, WriteRecord
from services.loader.domain.events import (
    Adopt,
    Adopted,
    Attach,
    Completed,
    Ended,
    Failed,
    Idle,
    LaidOut,
    MemoryPressure,
    Progressed,
    Release,
    Vacated,
    VacateFailed,
)
from services.loader.domain.room import PREPARE_AT_ONCE
from services.loader.domain.state import Stage, State
from tests.unit.loader.played import ERROR, Played, card, granted
from weights.pool.chunks import CHUNK_BYTES, Chunks


def test_failed_load_frees_its_chunks() -> None:
    p = Played()
    p.do(Attach(1, "a", card(), "complete"))
    granted(p)
    assert p.do(Failed("w1", 1, ERROR)) == (Refused(1, ERROR), Vacate(1, (0,), 100, 0))
    p.do(Vacated(1, 1000))
    assert p.do(Release(2, "a")) == (Freed(2, 0),)
    assert p.state.chunks == Chunks(64)


def test_load_over_the_whole_budget_is_refused_without_an_eviction() -> None:
    p = Played()
    p.do(Attach(1, "a", card(), "index"))
    assert p.do(LaidOut("w1", 1, 65 * CHUNK_BYTES, 1 << 40)) == (Deny(1),)
    p.do(Failed("w1", 1, ERROR))
    p.do(Attach(2, "b", card(), "index"))
    assert p.do(LaidOut("w1", 2, 2 * CHUNK_BYTES, CHUNK_BYTES)) == (Deny(2),)


def dram(*sizes: int, budget: int, pinned: tuple[int, ...] = ()) -> Played:
    """Load and release weights w1, w2, … of so many chunks, in that order."""
    p = Played(State(chunks=Chunks(64, budget * CHUNK_BYTES)))
    for n, size in enumerate(sizes, 1):
        p.now = float(n)
        revision = f"w{n}"
        p.do(Attach(n, f"i{n}", card(revision, pin=n in pinned), "complete"))
        granted(p, revision, p.state.runs, size * CHUNK_BYTES)
        p.do(Completed(revision, p.state.runs))
        p.do(Release(100 + n, f"i{n}"))
    return p


def small(*, count: int, cached: int) -> Played:
    """Cache weights w1, w2, … of 100 bytes, each in one of `count` chunks."""
    p = Played(State(chunks=Chunks(count, 64 * CHUNK_BYTES)))
    for n in range(1, cached + 1):
        p.now = float(n)
        p.do(Attach(n, f"i{n}", card(f"w{n}"), "complete"))
        granted(p, f"w{n}", n)
        p.do(Completed(f"w{n}", n))
        p.do(Release(100 + n, f"i{n}"))
    return p


def cached(p: Played) -> set[str]:
    return {e.weights_id for e in p.state.entries.values() if e.stage is Stage.CACHED}


def test_released_weights_stay_cached_and_are_attached_immediately() -> None:
    p = dram(2, budget=4)
    assert cached(p) == {"w1"}
    assert p.effects[-2:] == [WriteRecord("w1"), Freed(101, 0, 2 * CHUNK_BYTES)]
    assert p.do(Attach(5, "b", card("w1"), "complete")) == (WriteRecord("w1"), Attached(5, "w1"))
    assert p.state.chunks.charged == 0


def test_the_least_recently_used_weights_are_evicted_for_a_load() -> None:
    p = dram(2, 2, budget=4)
    p.do(Attach(10, "x", card("w1"), "index"))
    p.now = 10.0
    p.do(Release(11, "x"))
    p.do(Attach(12, "i3", card("w3"), "complete"))
    granted(p, "w3", p.state.runs, 2 * CHUNK_BYTES)
    p.do(Completed("w3", p.state.runs))
    p.do(Release(13, "i3"))
    assert cached(p) == {"w1", "w3"}


def test_weights_evicted_when_released_are_not_recorded() -> None:
    p = Played(State(chunks=Chunks(64, 2 * CHUNK_BYTES)))
    for number in (1, 2):
        p.do(Attach(number, f"i{number}", card(f"w{number}"), "complete"))
        granted(p, f"w{number}", number, 2 * CHUNK_BYTES)
        p.do(Completed(f"w{number}", number))
    p.do(Release(3, "i2"))
    effects = p.do(Release(4, "i1"))
    assert cached(p) == {"w2"}
    assert not [e for e in effects if isinstance(e, WriteRecord)]


def test_pinned_weights_stay_cached_and_weights_without_room_do_not() -> None:
    p = dram(3, 2, 1, budget=4, pinned=(1,))
    assert cached(p) == {"w1", "w3"}


def test_load_takes_memory_from_the_cache_once_it_is_verified_free() -> None:
    p = dram(2, 2, budget=4)
    p.do(Attach(10, "x", card("w3"), "index"))
    run = p.state.runs
    [forget, vacate] = p.do(LaidOut("w3", run, 3 * CHUNK_BYTES, CHUNK_BYTES))
    assert forget == RemoveRecord("w1")
    assert isinstance(vacate, Vacate)
    assert (vacate.run, vacate.chunks, vacate.keep) == (1, (0, 1), 2)
    # Its chunks stay warm for the load, which gets them only now.
    assert p.do(Vacated(1, CHUNK_BYTES)) == (Grant(run, (0, 1, 4)),)
    assert cached(p) == {"w2"}


def test_weights_are_evicted_for_a_load_that_lacks_chunks_and_not_memory() -> None:
    p = small(count=4, cached=4)
    p.do(Attach(10, "x", card("w5"), "index"))
    vacates = [e for e in p.do(LaidOut("w5", 5, CHUNK_BYTES + 1, 1 << 40)) if isinstance(e, Vacate)]
    assert [(v.chunks, v.keep) for v in vacates] == [((0,), 0), ((1,), 0)]
    assert cached(p) == {"w3", "w4"}
    assert p.do(Vacated(1, 1 << 40)) == ()
    assert p.do(Vacated(2, 1 << 40)) == (Grant(5, (0, 1)),)


def test_load_with_more_chunks_than_evictions_would_free_is_denied_without_one() -> None:
    p = small(count=4, cached=3)
    p.do(Attach(9, "y", card("w4"), "complete"))
    granted(p, "w4", 4)
    p.do(Attach(10, "x", card("w5"), "index"))
    assert p.do(LaidOut("w5", 5, 3 * CHUNK_BYTES + 1, 1 << 40)) == (Deny(5),)
    assert cached(p) == {"w1", "w2", "w3"}


def test_load_that_lacks_chunks_waits_for_those_of_a_cancelled_one() -> None:
    p = small(count=4, cached=1)
    p.do(Attach(9, "y", card("w2"), "complete"))
    granted(p, "w2", 2, 3 * CHUNK_BYTES)
    p.do(Release(11, "y"))
    p.do(Attach(10, "x", card("w3"), "index"))
    assert p.do(LaidOut("w3", 3, 2 * CHUNK_BYTES, 1 << 40)) == ()
    p.do(Ended("w2", 2))
    assert Grant(3, (1, 2)) in p.do(Vacated(2, 1 << 40))
    assert cached(p) == {"w1"}


def test_spare_chunks_of_the_wrong_size_are_freed_for_a_load_that_lacks_chunks() -> None:
    p = Played(State(chunks=Chunks(2, 64 * CHUNK_BYTES)))
    [vacate] = p.do(Adopted(ready=2, room=1 << 40))
    assert isinstance(vacate, Vacate)
    p.do(Vacated(vacate.run, 1 << 40))
    assert len(p.state.chunks.spare) == 2
    p.do(Attach(10, "x", card("w1"), "index"))
    run = p.state.runs
    [freed] = p.do(LaidOut("w1", run, 100, 1 << 40))
    assert isinstance(freed, Vacate)
    assert p.do(Vacated(freed.run, 1 << 40)) == (Grant(run, (0,)),)


def test_load_waits_for_memory_that_is_being_freed() -> None:
    p = dram(2, budget=0)
    assert p.state.chunks.leaving_bytes == 2 * CHUNK_BYTES
    p.do(Attach(10, "x", card("w2"), "index"))
    run = p.state.runs
    assert p.do(LaidOut("w2", run, 2 * CHUNK_BYTES, 0)) == ()
    assert p.do(Vacated(1, 2 * CHUNK_BYTES)) == (Grant(run, (0, 1)),)


def test_a_load_does_not_wait_for_memory_that_could_not_be_freed() -> None:
    p = dram(2, budget=0)
    p.do(Attach(10, "x", card("w2"), "index"))
    run = p.state.runs
    assert p.do(LaidOut("w2", run, 2 * CHUNK_BYTES, 0)) == ()
    assert p.do(VacateFailed(1, 0)) == (Deny(run),)
    p.do(Attach(11, "y", card("w3"), "index"))
    assert p.do(LaidOut("w3", p.state.runs, CHUNK_BYTES, CHUNK_BYTES)) == (Grant(p.state.runs, (2,)),), "not one of the lost"


def test_cancelled_load_is_charged_until_it_has_ended() -> None:
    p = Played(State(chunks=Chunks(64)))
    p.do(Attach(1, "a", card("w1"), "complete"))
    granted(p, "w1", 1, 2 * CHUNK_BYTES)
    p.do(Release(2, "a"))
    p.do(Attach(3, "b", card("w2"), "complete"))
    assert p.do(LaidOut("w2", 2, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES)) == (), "it may still be writing"
    p.do(Ended("w1", 1))
    [grant] = [e for e in p.do(Vacated(1, 3 * CHUNK_BYTES)) if isinstance(e, Grant)]
    assert grant.run == 2


def test_two_loads_do_not_count_on_the_same_memory() -> None:
    p = Played()
    for n in (1, 2):
        p.do(Attach(n, f"i{n}", card(f"w{n}"), "index"))
    room = 3 * CHUNK_BYTES
    assert p.do(LaidOut("w1", 1, 2 * CHUNK_BYTES, room)) == (Grant(1, (0, 1)),)
    assert p.do(LaidOut("w2", 2, 2 * CHUNK_BYTES, room)) == (Deny(2),)


def test_a_smaller_budget_after_a_restart_is_kept() -> None:
    p = Played(State(chunks=Chunks(64, CHUNK_BYTES)))
    p.do(Adopt("w1", "m", (0, 1), "/m", 2 * CHUNK_BYTES, ()))
    p.do(Adopt("w2", "m", (2,), "/m", CHUNK_BYTES, ("a",)))
    forget, vacate, quarantine = sorted(p.do(Adopted(mapped=(9,))), key=lambda e: (isinstance(e, Vacate), getattr(e, "run", 0)))
    assert forget == RemoveRecord("w1")
    assert isinstance(vacate, Vacate)
    assert vacate.chunks == (0, 1)
    assert isinstance(quarantine, Vacate)
    assert quarantine.chunks == (9,)


def test_memory_prepared_at_the_start_is_granted_to_the_first_load() -> None:
    p = Played(State(chunks=Chunks(64, 3 * CHUNK_BYTES)))
    [vacate] = p.do(Adopted(ready=5, room=1 << 40))
    assert isinstance(vacate, Vacate)
    assert (vacate.chunks, vacate.nbytes, vacate.keep) == ((0, 1, 2), 0, 3)
    p.do(Vacated(vacate.run, 1 << 40))
    p.do(Attach(1, "a", card(), "index"))
    assert p.do(LaidOut("w1", 2, 2 * CHUNK_BYTES, 0)) == (Grant(2, (0, 1)),)


def test_memory_is_prepared_in_steps_while_it_is_plentiful_and_idle() -> None:
    p = Played(State(chunks=Chunks(100, 64 * CHUNK_BYTES)))
    assert p.do(Adopted(ready=12)) == (), "there is time"
    assert p.do(Idle(10 * CHUNK_BYTES)) == (), "a tenth of the host's memory is left alone"
    [first] = p.do(Idle(100 * CHUNK_BYTES))
    assert isinstance(first, Vacate)
    assert (first.keep, first.nbytes) == (PREPARE_AT_ONCE, 0)
    [second] = p.do(Vacated(first.run, 90 * CHUNK_BYTES))
    assert isinstance(second, Vacate)
    assert second.keep == 4
    assert p.do(Vacated(second.run, 80 * CHUNK_BYTES)) == p.do(Idle(80 * CHUNK_BYTES)) == (), "it is enough"
    p.do(MemoryPressure(2 * CHUNK_BYTES))
    p.do(Attach(1, "a", card(), "index"))
    assert p.do(Idle(80 * CHUNK_BYTES)) == (), "a load is under way"
    p.do(Failed("w1", p.state.entries["w1"].run, ERROR))
    [third] = p.do(Idle(80 * CHUNK_BYTES))
    assert isinstance(third, Vacate)
    assert p.do(Vacated(third.run, 80 * CHUNK_BYTES, kept=0)) == (), "there was none: not again at once"
    assert len(p.state.chunks.spare) == 10


def test_memory_pressure_evicts_cached_weights_once() -> None:
    p = dram(2, 2, 1, budget=8, pinned=(1,))
    vacates = [e for e in p.do(MemoryPressure(CHUNK_BYTES)) if isinstance(e, Vacate)]
    assert [v.run for v in vacates] == [2]
    assert p.do(MemoryPressure(2 * CHUNK_BYTES)) == ()  # they are being evicted already
    assert cached(p) == {"w1", "w3"}


def test_bytes_above_the_watermark_are_not_promised_again() -> None:
    """Files begin with tensors that an engine needs last."""
    p = Played()
    p.do(Attach(1, "a", card("w1"), "complete"))
    granted(p, "w1", 1, 4 * CHUNK_BYTES)
    p.do(Progressed("w1", 1, 0, 3 * CHUNK_BYTES))
    p.do(Attach(2, "b", card("w2"), "index"))
    assert p.do(LaidOut("w2", 2, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES)) == (Grant(2, (4, 5)),)


def test_bytes_that_fill_spare_chunks_take_nothing_off_what_is_promised() -> None:
    p = Played(State(chunks=Chunks(64, 2 * CHUNK_BYTES)))
    [vacate] = p.do(Adopted(ready=2, room=1 << 40))
    assert isinstance(vacate, Vacate)
    p.do(Vacated(vacate.run, 1 << 40))
    p.do(Attach(1, "a", card("w1"), "complete"))
    granted(p, "w1", 2, 4 * CHUNK_BYTES)
    p.do(Progressed("w1", 2, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES))
    p.do(Attach(2, "b", card("w2"), "index"))
    assert p.do(LaidOut("w2", 3, CHUNK_BYTES, 2 * CHUNK_BYTES)) == (Deny(3),)
