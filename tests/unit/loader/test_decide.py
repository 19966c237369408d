"""The loader's decisions: who holds weights, which loads run, who is answered when."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.loader.domain.chunks import CHUNK_BYTES, Chunks
from services.loader.domain.decide import decide
from services.loader.domain.effects import (
    Accepted,
    Attached,
    CancelRun,
    Deny,
    Effect,
    Forget,
    Freed,
    Grant,
    Hurry,
    Refused,
    Remember,
    StartRun,
    Vacate,
)
from services.loader.domain.events import (
    Abandoned,
    Adopt,
    Adopted,
    Attach,
    Completed,
    Ended,
    Event,
    Failed,
    Indexed,
    Laid,
    Left,
    NodeHeard,
    Prepare,
    Pressed,
    Progressed,
    Quiet,
    Release,
    Stop,
    Vacated,
)
from services.loader.domain.lives import LOST_AFTER_S, MISSING_FOR_S
from services.loader.domain.room import READY_AT_ONCE
from services.loader.domain.state import Stage, State
from shared.contracts.models import ModelCard, ModelInfo, ModelSpec
from shared.errors import CheckpointInvalid

ERROR = CheckpointInvalid("damaged").body()


def card(revision: str = "w1", *, pin: bool = False) -> ModelCard:
    info = ModelInfo(
        source="/m",
        revision=revision,
        architecture="LlamaForCausalLM",
        model_type="llama",
        task="generate",
        weights_bytes=100,
        parameters=1,
        dtype="float32",
        context_length=10,
        kv_bytes_per_token=1,
    )
    return ModelCard(spec=ModelSpec(name=revision, source="/m", pin=pin), info=info, created=0)


@dataclass
class Played:
    """What the shell would have running after the events so far."""

    state: State = field(default_factory=lambda: State(chunks=Chunks(64)))
    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)

    def do(self, event: Event) -> tuple[Effect, ...]:
        self.state, effects = decide(self.state, event, self.now)
        self.effects.extend(effects)
        return effects


VACATE = (Forget("w1"), Vacate(1, (0,), 100, 0, "w1"))
"""What gives w1's memory back."""


def granted(p: Played, weights_id: str = "w1", run: int = 1, nbytes: int = 100, room: int = 1 << 40) -> None:
    """The run has its chunks and its index."""
    assert any(isinstance(e, Grant) for e in p.do(Laid(weights_id, run, nbytes, room)))
    p.do(Indexed(weights_id, run, "/m", nbytes))


def loaded(*instances: str) -> Played:
    """Weights w1, complete, held by `instances`."""
    p = Played()
    for n, i in enumerate(instances):
        p.do(Prepare(n, i, card(), 1))
    granted(p)
    p.do(Completed("w1", 1))
    return p


def test_prepare_starts_one_run_for_all() -> None:
    p = Played()
    assert p.do(Prepare(1, "a", card(), 1)) == (StartRun("w1", 1, card()), Accepted(1))
    assert p.do(Prepare(2, "a", card(), 1)) == (Accepted(2),)
    assert p.do(Prepare(3, "b", card(), 1)) == (Accepted(3),)


def test_attaches_are_answered_when_their_wait_is_over() -> None:
    p = Played()
    p.do(Attach(1, "a", card(), "index"))
    p.do(Attach(2, "a", card(), "complete"))
    assert p.do(Laid("w1", 1, 100, 1000)) == (Grant(1, (0,)),)
    assert p.do(Indexed("w1", 1, "/m", 100)) == (Attached(1, "w1"),)
    assert p.do(Attach(3, "b", card(), "index")) == (Attached(3, "w1"),)
    assert p.do(Progressed("w1", 1, 50)) == ()
    assert p.do(Completed("w1", 1)) == (Remember("w1"), Attached(2, "w1"))


def test_a_failure_is_told_to_who_waits_and_to_holders_who_ask_later() -> None:
    p = Played()
    p.do(Prepare(1, "late", card(), 1))
    p.do(Attach(2, "a", card(), "index"))
    assert p.do(Failed("w1", 1, ERROR)) == (Refused(2, ERROR),)
    assert p.do(Attach(3, "late", card(), "complete")) == (Refused(3, ERROR),)
    assert p.do(Attach(4, "new", card(), "complete")) == (StartRun("w1", 2, card()),)


def test_a_run_that_has_ended_is_not_heard_any_more() -> None:
    failed = Played()
    failed.do(Attach(1, "a", card(), "index"))
    failed.do(Failed("w1", 1, ERROR))
    complete = loaded("a")
    for p in (failed, complete):
        before = p.state
        for late in (Completed("w1", 1), Progressed("w1", 1, 50), Ended("w1", 1), Left("w1", 1, 1)):
            assert p.do(late) == ()
        assert p.state == before


def test_failed_weights_are_forgotten_with_their_last_holder() -> None:
    p = Played()
    p.do(Prepare(1, "a", card(), 1))
    p.do(Failed("w1", 1, ERROR))
    assert p.do(Release(2, "a")) == (Freed(2, 0),)
    assert p.state.entries == {}


def test_the_last_release_calls_off_a_load_and_waits_for_its_end() -> None:
    p = Played()
    p.do(Prepare(1, "a", card(), 1))
    p.do(Attach(2, "a", card(), "complete"))
    refused, cancel = p.do(Release(3, "a"))
    assert isinstance(refused, Refused)
    assert cancel == CancelRun("w1", 1)
    assert p.do(Release(4, "a")) == ()  # repeated: waits as well
    assert p.do(Ended("w1", 1)) == (Freed(3, 0), Freed(4, 0))
    assert p.state.entries == {}


def test_a_load_that_ends_while_called_off_is_removed() -> None:
    p = Played()
    p.do(Prepare(1, "a", card(), 1))
    granted(p)
    p.do(Release(2, "a"))
    assert p.do(Completed("w1", 1)) == VACATE[1:]
    assert p.do(Vacated(1, 1000)) == ()
    assert p.do(Left("w1", 1, 100)) == (Freed(2, 100),)


def test_who_comes_while_weights_leave_gets_a_fresh_load() -> None:
    p = loaded("a")
    assert p.do(Release(5, "a")) == VACATE
    assert p.do(Attach(6, "b", card(), "index")) == ()
    assert p.do(Left("w1", 1, 100)) == (Freed(5, 100), StartRun("w1", 2, card()))
    assert p.do(Indexed("w1", 1, "/m", 100)) == ()
    # The old chunks are not given away before it is proved that nobody maps them.
    assert p.do(Laid("w1", 2, 100, 1000)) == (Grant(2, (1,)),)
    assert p.do(Indexed("w1", 2, "/m", 100)) == (Attached(6, "w1"),)


def test_others_keep_the_segment() -> None:
    p = loaded("a", "b")
    assert p.do(Release(5, "a")) == (Remember("w1"), Freed(5, 0))
    assert p.state.entries["w1"].holders.keys() == {"b"}


def test_an_abandoned_attach_is_not_answered_and_still_holds() -> None:
    p = Played()
    p.do(Attach(1, "a", card(), "complete"))
    p.do(Abandoned(1))
    granted(p)
    assert p.do(Completed("w1", 1)) == (Remember("w1"),)
    assert "a" in p.state.entries["w1"].holders


def test_holders_the_nodeagent_lost_are_let_go() -> None:
    p = loaded("a", "b")
    p.now = 1.0
    p.do(NodeHeard(frozenset({"b"})))
    p.now = LOST_AFTER_S + 0.1
    assert p.do(NodeHeard(frozenset({"b"}))) == (Remember("w1"),)
    p.do(NodeHeard(frozenset()))
    p.do(NodeHeard(frozenset({"b"})))  # it was there all the time
    p.now += MISSING_FOR_S + 1
    assert p.do(NodeHeard(frozenset())) == ()
    p.now += MISSING_FOR_S
    assert p.do(NodeHeard(frozenset())) == VACATE


def test_holders_lost_together_leave_nothing_to_remember() -> None:
    p = loaded("a", "b")
    p.now = 100.0
    assert p.do(NodeHeard(frozenset())) == ()
    p.now = 200.0
    assert p.do(NodeHeard(frozenset())) == VACATE


def test_a_fresh_holder_is_not_lost_yet() -> None:
    p = loaded("a")
    for p.now in (1.0, 5.0, LOST_AFTER_S):
        assert p.do(NodeHeard(frozenset())) == ()


def test_adopted_segments_are_there_at_once() -> None:
    p = Played()
    p.do(Adopt("w1", "m", (3,), "/m", 100, ("a",)))
    assert p.do(Attach(1, "b", card(), "complete")) == (Remember("w1"), Attached(1, "w1"))


def test_stopping_keeps_what_is_complete() -> None:
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


def test_a_load_that_fails_midway_gives_its_chunks_back() -> None:
    p = Played()
    p.do(Attach(1, "a", card(), "complete"))
    granted(p)
    assert p.do(Failed("w1", 1, ERROR)) == (Refused(1, ERROR), Vacate(1, (0,), 100, 0))
    p.do(Vacated(1, 1000))
    assert p.do(Release(2, "a")) == (Freed(2, 0),)
    assert p.state.chunks == Chunks(64)


def test_a_background_load_hurries_for_a_request() -> None:
    p = Played()
    start, _ = p.do(Prepare(1, "a", card(), 1, background=True))
    assert isinstance(start, StartRun)
    assert start.background
    assert p.do(Attach(2, "a", card(), "complete")) == ()  # its own engine: still nobody waits
    assert p.do(Prepare(3, "b", card(), 1)) == (Hurry(1), Accepted(3))
    assert p.do(Prepare(4, "c", card(), 1)) == (Accepted(4),)


def test_a_connection_is_not_for_the_nodeagent_to_know() -> None:
    p = Played()
    p.do(Attach(1, "socket", card(), "complete", local=True))
    granted(p)
    p.do(Completed("w1", 1))
    for p.now in (100.0, 200.0):
        assert p.do(NodeHeard(frozenset())) == ()
    assert p.do(Release(2, "socket")) == VACATE


def test_more_than_there_is_is_denied_and_nobody_leaves_for_it() -> None:
    p = Played()
    p.do(Attach(1, "a", card(), "index"))
    assert p.do(Laid("w1", 1, 65 * CHUNK_BYTES, 1 << 40)) == (Deny(1),)
    p.do(Failed("w1", 1, ERROR))
    p.do(Attach(2, "b", card(), "index"))
    assert p.do(Laid("w1", 2, 2 * CHUNK_BYTES, CHUNK_BYTES)) == (Deny(2),)


def test_adapters_go_with_the_instance_that_loaded_them() -> None:
    p = loaded("a")
    p.do(Attach(5, "a+lora", card("w2"), "complete"))
    granted(p, "w2", 2)
    p.do(Completed("w2", 2))
    p.now = 100.0
    for p.now in (100.0, 200.0):
        assert p.do(NodeHeard(frozenset({"a"}))) == ()
    effects = p.do(Release(6, "a"))
    assert [e.run for e in effects if isinstance(e, Vacate)] == [2, 1]
    [refused] = p.do(Attach(7, "a+other", card("w3"), "index"))
    assert isinstance(refused, Refused)


def dram(*sizes: int, budget: int, pinned: tuple[int, ...] = ()) -> Played:
    """Weights w1, w2, … of so many chunks, loaded and let go in that order."""
    p = Played(State(chunks=Chunks(64, budget * CHUNK_BYTES)))
    for n, size in enumerate(sizes, 1):
        p.now = float(n)
        revision = f"w{n}"
        p.do(Attach(n, f"i{n}", card(revision, pin=n in pinned), "complete"))
        granted(p, revision, p.state.runs, size * CHUNK_BYTES)
        p.do(Completed(revision, p.state.runs))
        p.do(Release(100 + n, f"i{n}"))
    return p


def cached(p: Played) -> set[str]:
    return {e.weights_id for e in p.state.entries.values() if e.stage is Stage.CACHED}


def test_what_is_let_go_stays_cached_and_is_there_at_once() -> None:
    p = dram(2, budget=4)
    assert cached(p) == {"w1"}
    assert p.effects[-2:] == [Remember("w1"), Freed(101, 0, 2 * CHUNK_BYTES)]
    assert p.do(Attach(5, "b", card("w1"), "complete")) == (Remember("w1"), Attached(5, "w1"))
    assert p.state.chunks.charged == 0


def test_the_least_recently_used_leave_for_what_comes() -> None:
    p = dram(2, 2, budget=4)
    p.do(Attach(10, "x", card("w1"), "index"))
    p.now = 10.0
    p.do(Release(11, "x"))
    p.do(Attach(12, "i3", card("w3"), "complete"))
    granted(p, "w3", p.state.runs, 2 * CHUNK_BYTES)
    p.do(Completed("w3", p.state.runs))
    p.do(Release(13, "i3"))
    assert cached(p) == {"w1", "w3"}


def test_weights_that_leave_as_they_are_let_go_are_not_written_down() -> None:
    p = Played(State(chunks=Chunks(64, 2 * CHUNK_BYTES)))
    for number in (1, 2):
        p.do(Attach(number, f"i{number}", card(f"w{number}"), "complete"))
        granted(p, f"w{number}", number, 2 * CHUNK_BYTES)
        p.do(Completed(f"w{number}", number))
    p.do(Release(3, "i2"))
    effects = p.do(Release(4, "i1"))
    assert cached(p) == {"w2"}
    assert not [e for e in effects if isinstance(e, Remember)]


def test_pinned_weights_stay_and_what_has_no_room_beside_them_is_not_cached() -> None:
    p = dram(3, 2, 1, budget=4, pinned=(1,))
    assert cached(p) == {"w1", "w3"}


def test_a_load_that_needs_room_takes_it_from_the_cache_when_it_is_proved_free() -> None:
    p = dram(2, 2, budget=4)
    p.do(Attach(10, "x", card("w3"), "index"))
    run = p.state.runs
    [forget, vacate] = p.do(Laid("w3", run, 3 * CHUNK_BYTES, CHUNK_BYTES))
    assert forget == Forget("w1")
    assert isinstance(vacate, Vacate)
    assert (vacate.run, vacate.chunks, vacate.keep) == (1, (0, 1), 2)
    # Its chunks stay warm for the load, which gets them only now.
    assert p.do(Vacated(1, CHUNK_BYTES)) == (Grant(run, (0, 1, 4)),)
    assert cached(p) == {"w2"}


def test_a_load_waits_for_what_leaves_already() -> None:
    p = dram(2, budget=0)
    assert p.state.chunks.leaving_bytes == 2 * CHUNK_BYTES
    p.do(Attach(10, "x", card("w2"), "index"))
    run = p.state.runs
    assert p.do(Laid("w2", run, 2 * CHUNK_BYTES, 0)) == ()
    assert p.do(Vacated(1, 2 * CHUNK_BYTES)) == (Grant(run, (0, 1)),)


def test_a_load_that_is_called_off_is_counted_with_until_it_has_ended() -> None:
    p = Played(State(chunks=Chunks(64)))
    p.do(Attach(1, "a", card("w1"), "complete"))
    granted(p, "w1", 1, 2 * CHUNK_BYTES)
    p.do(Release(2, "a"))
    p.do(Attach(3, "b", card("w2"), "complete"))
    assert p.do(Laid("w2", 2, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES)) == (), "it may still be writing"
    p.do(Ended("w1", 1))
    [grant] = [e for e in p.do(Vacated(1, 3 * CHUNK_BYTES)) if isinstance(e, Grant)]
    assert grant.run == 2


def test_two_loads_do_not_count_on_the_same_memory() -> None:
    p = Played()
    for n in (1, 2):
        p.do(Attach(n, f"i{n}", card(f"w{n}"), "index"))
    room = 3 * CHUNK_BYTES
    assert p.do(Laid("w1", 1, 2 * CHUNK_BYTES, room)) == (Grant(1, (0, 1)),)
    assert p.do(Laid("w2", 2, 2 * CHUNK_BYTES, room)) == (Deny(2),)


def test_a_smaller_budget_after_a_restart_is_kept() -> None:
    p = Played(State(chunks=Chunks(64, CHUNK_BYTES)))
    p.do(Adopt("w1", "m", (0, 1), "/m", 2 * CHUNK_BYTES, ()))
    p.do(Adopt("w2", "m", (2,), "/m", CHUNK_BYTES, ("a",)))
    forget, vacate, quarantine = sorted(p.do(Adopted(mapped=(9,))), key=lambda e: (isinstance(e, Vacate), getattr(e, "run", 0)))
    assert forget == Forget("w1")
    assert isinstance(vacate, Vacate)
    assert vacate.chunks == (0, 1)
    assert isinstance(quarantine, Vacate)
    assert quarantine.chunks == (9,)


def test_memory_made_ready_at_the_start_is_what_the_first_load_gets() -> None:
    p = Played(State(chunks=Chunks(64, 3 * CHUNK_BYTES)))
    [vacate] = p.do(Adopted(ready=5, room=1 << 40))
    assert isinstance(vacate, Vacate)
    assert (vacate.chunks, vacate.nbytes, vacate.keep) == ((0, 1, 2), 0, 3)
    p.do(Vacated(vacate.run, 1 << 40))
    p.do(Attach(1, "a", card(), "index"))
    assert p.do(Laid("w1", 2, 2 * CHUNK_BYTES, 0)) == (Grant(2, (0, 1)),)


def test_memory_is_made_ready_in_steps_while_there_is_plenty_and_nothing_loads() -> None:
    p = Played(State(chunks=Chunks(100, 64 * CHUNK_BYTES)))
    assert p.do(Adopted(ready=12)) == (), "there is time"
    assert p.do(Quiet(10 * CHUNK_BYTES)) == (), "a tenth of the host's memory is left alone"
    [first] = p.do(Quiet(100 * CHUNK_BYTES))
    assert isinstance(first, Vacate)
    assert (first.keep, first.nbytes) == (READY_AT_ONCE, 0)
    [second] = p.do(Vacated(first.run, 90 * CHUNK_BYTES))
    assert isinstance(second, Vacate)
    assert second.keep == 4
    assert p.do(Vacated(second.run, 80 * CHUNK_BYTES)) == p.do(Quiet(80 * CHUNK_BYTES)) == (), "it is enough"
    p.do(Pressed(2 * CHUNK_BYTES))
    p.do(Attach(1, "a", card(), "index"))
    assert p.do(Quiet(80 * CHUNK_BYTES)) == (), "a load is under way"
    p.do(Failed("w1", p.state.entries["w1"].run, ERROR))
    [third] = p.do(Quiet(80 * CHUNK_BYTES))
    assert isinstance(third, Vacate)
    assert p.do(Vacated(third.run, 80 * CHUNK_BYTES, kept=0)) == (), "there was none: not again at once"
    assert len(p.state.chunks.spare) == 10


def test_a_host_short_of_memory_has_cached_weights_leave_once() -> None:
    p = dram(2, 2, 1, budget=8, pinned=(1,))
    vacates = [e for e in p.do(Pressed(CHUNK_BYTES)) if isinstance(e, Vacate)]
    assert [v.run for v in vacates] == [2]
    assert p.do(Pressed(2 * CHUNK_BYTES)) == ()  # they are leaving already
    assert cached(p) == {"w1", "w3"}
