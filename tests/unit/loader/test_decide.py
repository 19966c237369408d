"""The loader's decisions, by a state machine that plays the shell: runs, removals and waiters in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.loader.domain.decide import LOST_AFTER_S, MISSING_FOR_S, decide
from services.loader.domain.events import (
    Abandoned,
    Accepted,
    Adopt,
    Attach,
    Attached,
    CancelRun,
    Completed,
    Effect,
    Event,
    Failed,
    Freed,
    Indexed,
    Left,
    NodeHeard,
    Prepare,
    Progressed,
    Refused,
    Release,
    Remember,
    RemoveSegment,
    StartRun,
    Stop,
)
from services.loader.domain.state import Stage, State
from shared.contracts.models import ModelCard, ModelInfo, ModelSpec
from shared.errors import CheckpointInvalid

ERROR = CheckpointInvalid("damaged").body()


def card(revision: str = "w1") -> ModelCard:
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
    return ModelCard(spec=ModelSpec(name=revision, source="/m"), info=info, created=0)


@dataclass
class Played:
    """What the shell would have running after the events so far."""

    state: State = field(default_factory=State)
    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)

    def do(self, event: Event) -> tuple[Effect, ...]:
        self.state, effects = decide(self.state, event, self.now)
        self.effects.extend(effects)
        return effects


def loaded(*instances: str) -> Played:
    """Weights w1, complete, held by `instances`."""
    p = Played()
    for n, i in enumerate(instances):
        p.do(Prepare(n, i, card(), 1))
    p.do(Indexed("w1", 1, "seg", "/m", 100))
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
    assert p.do(Indexed("w1", 1, "seg", "/m", 100)) == (Attached(1, "w1"),)
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
        for late in (Completed("w1", 1), Progressed("w1", 1, 50), Left("w1", 1, 1)):
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
    assert p.do(Left("w1", 1, 77)) == (Freed(3, 77), Freed(4, 77))
    assert p.state.entries == {}


def test_a_load_that_ends_while_called_off_is_removed() -> None:
    p = Played()
    p.do(Prepare(1, "a", card(), 1))
    p.do(Indexed("w1", 1, "seg", "/m", 100))
    p.do(Release(2, "a"))
    assert p.do(Completed("w1", 1)) == (RemoveSegment("w1", 1, "seg"),)
    assert p.do(Left("w1", 1, 100)) == (Freed(2, 100),)


def test_who_comes_while_weights_leave_gets_a_fresh_load() -> None:
    p = loaded("a")
    assert p.do(Release(5, "a")) == (RemoveSegment("w1", 1, "seg"),)
    assert p.do(Attach(6, "b", card(), "index")) == ()
    assert p.do(Left("w1", 1, 100)) == (Freed(5, 100), StartRun("w1", 2, card()))
    assert p.do(Indexed("w1", 1, "old", "/m", 100)) == ()
    assert p.do(Indexed("w1", 2, "new", "/m", 100)) == (Attached(6, "w1"),)


def test_others_keep_the_segment() -> None:
    p = loaded("a", "b")
    assert p.do(Release(5, "a")) == (Remember("w1"), Freed(5, 0))
    assert p.state.entries["w1"].holders.keys() == {"b"}


def test_an_abandoned_attach_is_not_answered_and_still_holds() -> None:
    p = Played()
    p.do(Attach(1, "a", card(), "complete"))
    p.do(Abandoned(1))
    p.do(Indexed("w1", 1, "seg", "/m", 100))
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
    assert p.do(NodeHeard(frozenset())) == (RemoveSegment("w1", 1, "seg"),)


def test_holders_lost_together_leave_nothing_to_remember() -> None:
    p = loaded("a", "b")
    p.now = 100.0
    assert p.do(NodeHeard(frozenset())) == ()
    p.now = 200.0
    assert p.do(NodeHeard(frozenset())) == (RemoveSegment("w1", 1, "seg"),)


def test_a_fresh_holder_is_not_lost_yet() -> None:
    p = loaded("a")
    for p.now in (1.0, 5.0, LOST_AFTER_S):
        assert p.do(NodeHeard(frozenset())) == ()


def test_adopted_segments_are_there_at_once() -> None:
    p = Played()
    p.do(Adopt("w1", "m", "seg", "/m", 100, ("a",)))
    assert p.do(Attach(1, "b", card(), "complete")) == (Remember("w1"), Attached(1, "w1"))


def test_stopping_keeps_what_is_complete() -> None:
    p = loaded("a")
    p.do(Attach(5, "b", card("w2"), "complete"))
    refused, cancel = p.do(Stop())
    assert isinstance(refused, Refused)
    assert cancel == CancelRun("w2", 2)
    settled = [p.state.settled]
    p.do(Left("w2", 2, 0))
    assert [*settled, p.state.settled] == [False, True]
    assert p.state.entries.keys() == {"w1"}
    [refused] = p.do(Prepare(6, "c", card(), 1))
    assert isinstance(refused, Refused)


class Shell(RuleBasedStateMachine):
    """Runs and removals end when and how Hypothesis likes; replies are counted; memory is tracked."""

    instances = Bundle("instances")

    @initialize()
    def begin(self) -> None:
        self.played = Played()
        self.replies: dict[int, str] = {}
        self.answered: set[int] = set()
        self.running: dict[int, str] = {}
        self.cancelled: set[int] = set()
        self.removing: dict[int, str] = {}
        self.memory: dict[int, str] = {}
        self.epoch = 1

    def do(self, event: Event) -> None:
        for effect in self.played.do(event):
            match effect:
                case StartRun():
                    assert effect.weights_id not in self.running.values(), "two runs for one revision"
                    assert effect.weights_id not in self.memory.values(), "memory charged twice"
                    self.running[effect.run] = effect.weights_id
                case CancelRun():
                    assert effect.run in self.running
                    self.cancelled.add(effect.run)
                case RemoveSegment():
                    assert self.memory[effect.run] == effect.weights_id
                    assert effect.run not in self.running
                    self.removing[effect.run] = effect.weights_id
                case Accepted() | Attached() | Freed() | Refused():
                    assert effect.reply in self.replies, "an answer to nobody"
                    assert effect.reply not in self.answered, "answered twice"
                    self.answered.add(effect.reply)
                    if isinstance(effect, Attached):
                        entry = self.played.state.entries[effect.weights_id]
                        assert entry.segment
                        assert entry.run in self.memory
                case Remember():
                    assert self.played.state.entries[effect.weights_id].stage is Stage.COMPLETE

    def number(self, what: str) -> int:
        number = len(self.replies) + 1
        self.replies[number] = what
        return number

    @rule(target=instances, n=st.integers(0, 5))
    def instance(self, n: int) -> str:
        return f"i{n}"

    @rule(i=instances, w=st.sampled_from(["w1", "w2"]), old=st.booleans())
    def prepare(self, i: str, w: str, old: bool) -> None:
        number = self.number("prepare")
        self.do(Prepare(number, i, card(w), (self.epoch - old) << 32))
        assert number in self.answered

    @rule(i=instances, w=st.sampled_from(["w1", "w2"]), index=st.booleans())
    def attach(self, i: str, w: str, index: bool) -> None:
        self.do(Attach(self.number("attach"), i, card(w), "index" if index else "complete"))

    @rule(i=instances)
    def release(self, i: str) -> None:
        self.do(Release(self.number("release"), i))
        assert self.played.state.held_by(i) is None

    @rule(known=st.sets(st.integers(0, 5)), later=st.floats(0.1, 8))
    def node(self, known: set[int], later: float) -> None:
        self.played.now += later
        self.do(NodeHeard(frozenset(f"i{n}" for n in known)))

    @precondition(lambda self: len(self.answered) < len(self.replies))
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.replies.keys() - self.answered)))
        self.answered.add(number)
        self.do(Abandoned(number))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), step=st.sampled_from(["index", "progress", "complete", "fail", "left"]))
    def run_reports(self, data: st.DataObject, step: str) -> None:
        run = data.draw(st.sampled_from(sorted(self.running)))
        weights_id = self.running[run]
        if step == "index" and run not in self.memory:
            self.memory[run] = weights_id
            self.do(Indexed(weights_id, run, f"seg{run}", "/m", 100))
        elif step == "progress" and run in self.memory:
            self.do(Progressed(weights_id, run, 50))
        elif step == "complete" and run in self.memory:
            del self.running[run]
            self.do(Completed(weights_id, run))
        elif step == "fail":
            del self.running[run]
            self.memory.pop(run, None)
            self.do(Failed(weights_id, run, ERROR))
        elif step == "left" and run in self.cancelled:
            del self.running[run]
            self.memory.pop(run, None)
            self.do(Left(weights_id, run, 50))

    @precondition(lambda self: self.removing)
    @rule(data=st.data())
    def removed(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.removing)))
        weights_id = self.removing.pop(run)
        del self.memory[run]
        self.do(Left(weights_id, run, 100))

    @rule(run=st.integers(0, 3), w=st.sampled_from(["w1", "w2"]))
    def stale_report(self, run: int, w: str) -> None:
        if run not in self.running and run not in self.memory:
            self.do(Completed(w, run))
            self.do(Left(w, run, 1))

    @rule()
    def stop(self) -> None:
        self.do(Stop())

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "played"):
            return
        state = self.played.state
        held: list[str] = []
        for entry in state.entries.values():
            held.extend(entry.holders)
            waiting = {w.instance_id for w in entry.waiters}
            assert waiting <= set(entry.holders)
            match entry.stage:
                case Stage.LOADING | Stage.INDEXED:
                    assert entry.run in self.running
                    assert entry.run not in self.cancelled
                    assert entry.holders
                case Stage.COMPLETE:
                    assert entry.run in self.memory
                    assert entry.run not in self.removing
                    assert entry.holders
                    assert not entry.waiters
                case Stage.FAILED:
                    assert entry.run not in self.memory
                    assert entry.holders
                case Stage.LEAVING:
                    assert entry.run in self.cancelled or entry.run in self.removing
                    assert bool(entry.holders) == (entry.again is not None)
        assert len(held) == len(set(held)), "an instance holds two models"
        assert {*self.memory, *self.running} <= {e.run for e in state.entries.values()}, "memory or a run that nobody knows of"

    def teardown(self) -> None:
        """Everything released and every run ended: nothing may be left, nobody may still wait."""
        if not hasattr(self, "played"):
            return
        for n in range(6):
            self.do(Release(self.number("release"), f"i{n}"))
        for run in list(self.running):
            weights_id = self.running.pop(run)
            self.memory.pop(run, None)
            self.do(Left(weights_id, run, 0))
        for run in list(self.removing):
            weights_id = self.removing.pop(run)
            self.memory.pop(run, None)
            self.do(Left(weights_id, run, 0))
        assert self.played.state.entries == {}
        assert not self.memory
        assert self.answered == self.replies.keys()


Shell.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestShell = Shell.TestCase
