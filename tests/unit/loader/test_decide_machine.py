"""The loader's decisions under a state machine that plays the shell.

Runs, memory and waiters are in any order.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.loader.domain.effects import (
    Accepted,
    Attached,
    CancelRun,
    CloseArena,
    Deny,
    Freed,
    Grant,
    OpenArena,
    Refused,
    RemoveRecord,
    StartRun,
    Vacate,
    WriteRecord,
)
from services.loader.domain.events import (
    Abandoned,
    Adopted,
    ArenaClosed,
    Attach,
    Completed,
    CopiedToDevice,
    Ended,
    Event,
    Failed,
    Idle,
    Indexed,
    LaidOut,
    MemoryPressure,
    NodeReported,
    Prepare,
    Progressed,
    Reclaimed,
    Release,
    Stop,
    Vacated,
)
from services.loader.domain.state import OnDevice, Stage, State, Until
from tests.support.examples import examples
from tests.unit.loader.played import ERROR, Played, card
from weights.pool.chunks import CHUNK_BYTES, Chunks, parts

SIZES = {"w1": 2 * CHUNK_BYTES + 100, "w2": CHUNK_BYTES, "w3": 5000, "w4": 3 * CHUNK_BYTES}
PINNED = "w2"
CHUNKS = 8
WEIGHTS = st.sampled_from(sorted(SIZES))
INSTANCES = st.sampled_from([f"i{n}" for n in range(6)])
DEVICES = st.sampled_from([None, None, "cuda:0", "cuda:1"])


class Shell(RuleBasedStateMachine):
    """The shell: Hypothesis chooses when runs and memory releases report, and how.

    It counts replies, and tracks every chunk's memory.
    """

    @initialize(budget=st.integers(0, 6), memory=st.integers(1, 8), ready=st.integers(0, 3))
    def begin(self, budget: int, memory: int, ready: int) -> None:
        self.played = Played(State(chunks=Chunks(CHUNKS, budget * CHUNK_BYTES)))
        self.physical = memory * CHUNK_BYTES + 5000
        self.replies: dict[int, str] = {}
        self.answered: set[int] = set()
        self.running: dict[int, str] = {}
        self.laid: set[int] = set()
        self.denied: set[int] = set()
        self.indexed: set[int] = set()
        self.cancelled: set[int] = set()
        self.owned: dict[int, tuple[int, ...]] = {}
        self.vacating: dict[int, Vacate] = {}
        self.reported: set[int] = set()
        self.memory: dict[int, int] = {}
        self.records: set[str] = set()
        self.arenas: dict[int, OpenArena] = {}
        self.closing: set[int] = set()
        self.epoch = 1
        self.do(Adopted(ready=ready, room=self.room))

    @property
    def room(self) -> int:
        return self.physical - sum(self.memory.values())

    def do(self, event: Event) -> None:
        for effect in self.played.do(event):
            match effect:
                case StartRun():
                    assert effect.weights_id not in self.running.values(), "two runs for one revision"
                    self.running[effect.run] = effect.weights_id
                case CancelRun():
                    assert effect.run in self.running
                    self.cancelled.add(effect.run)
                case Grant():
                    self.granted(effect)
                case Deny():
                    assert effect.run in self.laid
                    self.denied.add(effect.run)
                case OpenArena():
                    assert effect.chunks == self.owned[effect.run], "copied from chunks that are another's"
                    self.arenas[effect.number] = effect
                case CloseArena():
                    del self.arenas[effect.number]
                    self.closing.add(effect.number)
                case RemoveRecord():
                    self.records.discard(effect.weights_id)
                case Vacate():
                    self.vacate(effect)
                case WriteRecord():
                    assert self.played.state.entries[effect.key].stage in (Stage.COMPLETE, Stage.CACHED)
                    self.records.add(effect.key)
                case Accepted() | Attached() | Freed() | Refused():
                    assert effect.reply in self.replies, "an answer without a request"
                    assert effect.reply not in self.answered, "answered twice"
                    self.answered.add(effect.reply)
                    if isinstance(effect, Attached):
                        assert self.played.state.entries[effect.key].run in self.owned

    def granted(self, grant: Grant) -> None:
        assert grant.run in self.laid
        assert len(set(grant.chunks)) == len(grant.chunks)
        others = [c for chunks in self.owned.values() for c in chunks] + [c for v in self.vacating.values() for c in v.chunks]
        assert not set(grant.chunks) & set(others), "a chunk with two owners"
        self.owned[grant.run] = grant.chunks
        needs = dict(zip(grant.chunks, parts(SIZES[self.running[grant.run]]), strict=True))
        assert all(self.memory.get(c, 0) <= n for c, n in needs.items()), "more memory than is reported"
        promised = {c: n for run, chunks in self.owned.items() for c, n in zip(chunks, parts(self.size(run)), strict=True)}
        assert sum((self.memory | promised).values()) <= self.physical, "memory promised twice"

    def size(self, run: int) -> int:
        held = {e.run: e.weights_id for e in self.played.state.entries.values()}
        return SIZES[(held | self.running).get(run, "")] if run in held or run in self.running else 0

    def vacate(self, order: Vacate) -> None:
        owned = self.owned.pop(order.run, None)
        assert owned in (None, order.chunks)
        assert order.run not in self.running or order.run in self.cancelled, "chunks taken from a run that writes them"
        self.vacating[order.run] = order
        self.arenas = {n: a for n, a in self.arenas.items() if a.run != order.run}

    def number(self, what: str) -> int:
        number = len(self.replies) + 1
        self.replies[number] = what
        return number

    # -- requests ----------------------------------------------------------------------------------

    @rule(i=INSTANCES, w=WEIGHTS, old=st.booleans(), background=st.booleans(), device=DEVICES)
    def prepare(self, i: str, w: str, old: bool, background: bool, device: str | None) -> None:
        number = self.number("prepare")
        self.do(Prepare(number, i, card(w, pin=w == PINNED), (self.epoch - old) << 32, background=background, device=device))
        assert number in self.answered

    @rule(i=INSTANCES, w=WEIGHTS, index=st.booleans(), device=DEVICES)
    def attach(self, i: str, w: str, index: bool, device: str | None) -> None:
        until: Until = "index" if index else "complete"
        self.do(Attach(self.number("attach"), i, card(w, pin=w == PINNED), until, device=device))

    @rule(i=INSTANCES)
    def release(self, i: str) -> None:
        self.do(Release(self.number("release"), i))
        assert self.played.state.held_by(i) is None

    @rule(known=st.sets(st.integers(0, 5)), later=st.floats(0.1, 8))
    def node(self, known: set[int], later: float) -> None:
        self.played.now += later
        self.do(NodeReported(frozenset(f"i{n}" for n in known)))

    @precondition(lambda self: len(self.answered) < len(self.replies))
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.replies.keys() - self.answered)))
        self.answered.add(number)
        self.do(Abandoned(number))

    # -- workers -----------------------------------------------------------------------------------

    @precondition(lambda self: self.running)
    @rule(data=st.data(), step=st.sampled_from(["on", "on", "on", "on", "on", "progress", "fail", "end"]))
    def run_reports(self, data: st.DataObject, step: str) -> None:
        run = data.draw(st.sampled_from(sorted(self.running)))
        weights_id = self.running[run]
        size = SIZES[weights_id]
        if step == "on":
            step = "lay" if run not in self.laid else "index" if run not in self.indexed else "complete"
        if step == "lay" and run not in self.laid:
            self.laid.add(run)
            self.do(LaidOut(weights_id, run, size, self.room))
        elif step == "index" and run in self.owned and run not in self.indexed:
            self.indexed.add(run)
            self.do(Indexed(weights_id, run, "/m", size))
        elif step == "progress" and run in self.indexed:
            self.fill(run, size // 2)
            self.do(Progressed(weights_id, run, size // 2))
        elif step == "complete" and run in self.indexed:
            self.fill(run, size)
            del self.running[run]
            self.do(Completed(weights_id, run))
        elif step == "fail" and (run not in self.laid or run in self.owned or run in self.denied):
            del self.running[run]
            self.do(Failed(weights_id, run, ERROR))
        elif step == "end" and run in self.cancelled:
            del self.running[run]
            self.do(Ended(weights_id, run))

    def fill(self, run: int, nbytes: int) -> None:
        for chunk, need in zip(self.owned[run], parts(nbytes), strict=False):
            self.memory[chunk] = max(self.memory.get(chunk, 0), need)

    @precondition(lambda self: self.arenas)
    @rule(data=st.data(), failed=st.booleans())
    def brought(self, data: st.DataObject, failed: bool) -> None:
        arena = self.arenas[data.draw(st.sampled_from(sorted(self.arenas)))]
        self.do(CopiedToDevice(arena.weights_id, arena.number, failed))

    @precondition(lambda self: self.closing)
    @rule(data=st.data())
    def arena_closed(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.closing)))
        self.closing.remove(number)
        self.do(ArenaClosed(number, 1))

    @precondition(lambda self: self.vacating)
    @rule(data=st.data(), late=st.booleans(), lacking=st.integers(0, 2))
    def vacated(self, data: st.DataObject, late: bool, lacking: int) -> None:
        """Report that chunks are vacated.

        Args:
            late: The release is answered before proof that no process maps the chunks.
        """
        order = self.vacating[data.draw(st.sampled_from(sorted(self.vacating)))]
        if late and order.weights_id is not None and order.run not in self.reported:
            self.reported.add(order.run)
            self.do(Reclaimed(order.weights_id, order.run, 0))
            return
        self.given_back(order, lacking)

    def given_back(self, order: Vacate, lacking: int = 0) -> None:
        """Report that chunks have their memory.

        Args:
            lacking: The number of chunks that got none.
        """
        del self.vacating[order.run]
        if order.nbytes == 0:
            kept = max(0, order.keep - lacking)
            assert self.room >= order.keep * CHUNK_BYTES, "made ready what there is no memory for"
            self.memory |= dict.fromkeys(order.chunks[:kept], CHUNK_BYTES)
            self.do(Vacated(order.run, self.room, kept if lacking else None))
            return
        for chunk in order.chunks[order.keep :]:
            self.memory.pop(chunk, None)
        self.memory |= dict.fromkeys(order.chunks[: order.keep], CHUNK_BYTES)
        self.do(Vacated(order.run, self.room))
        if order.weights_id is not None and order.run not in self.reported:
            self.do(Reclaimed(order.weights_id, order.run, 0))

    @rule(run=st.integers(0, 3), w=WEIGHTS)
    def stale_report(self, run: int, w: str) -> None:
        if run not in self.running and run not in self.owned and run not in self.vacating:
            self.do(Completed(w, run))
            self.do(Reclaimed(w, run, 1))

    @rule(chunks=st.integers(1, 4))
    def pressed(self, chunks: int) -> None:
        self.do(MemoryPressure(chunks * CHUNK_BYTES))

    @rule()
    def quiet(self) -> None:
        self.do(Idle(self.room))

    @rule(really=st.integers(0, 19))
    def stop(self, really: int) -> None:
        """Stop the loader, rarely: it is the last event."""
        if really == 7:
            self.do(Stop())

    # -- invariants --------------------------------------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "played"):
            return
        state = self.played.state
        held: list[str] = []
        for entry in state.entries.values():
            held.extend(entry.holders)
            assert {w.instance_id for w in entry.waiters} <= set(entry.holders)
            match entry.stage:
                case Stage.LOADING | Stage.INDEXED:
                    assert entry.run in self.running
                    assert entry.run not in self.cancelled
                    assert entry.holders
                case Stage.COMPLETE:
                    assert entry.run in self.owned
                    assert entry.holders
                    coming = {d for d, a in entry.arenas.items() if a.stage is OnDevice.COMING}
                    assert {entry.holders[w.instance_id].device for w in entry.waiters} <= coming
                case Stage.CACHED:
                    assert entry.run in self.owned
                    assert not entry.holders
                    assert entry.weights_id in self.records
                case Stage.FAILED:
                    assert entry.run not in self.owned
                    assert entry.holders
                case Stage.LEAVING:
                    assert entry.run in self.cancelled or entry.run in self.vacating or entry.run in self.reported
                    assert bool(entry.holders) == (entry.again is not None)
            if entry.stage in (Stage.INDEXED, Stage.COMPLETE, Stage.CACHED):
                assert set(entry.arenas) == {h.device for h in entry.holders.values()} - {None}
                assert {a.number for a in entry.arenas.values()} == {n for n, a in self.arenas.items() if a.run == entry.run}
        assert set(state.closing_arenas) == self.closing
        assert len(held) == len(set(held)), "an instance holds two models"
        assert {*self.owned, *self.running} <= {e.run for e in state.entries.values()}, "memory or a run without an entry"

    @invariant()
    def every_chunk_has_one_owner(self) -> None:
        if not hasattr(self, "played"):
            return
        table = self.played.state.chunks
        everyone = [
            *table.spare,
            *(c for o in table.owned.values() for c in o.chunks),
            *(c for d in table.doomed.values() for c in d.chunks),
        ]
        assert len(everyone) == len(set(everyone)), "a chunk with two owners"
        assert set(everyone) <= set(range(CHUNKS))
        assert {k: o.chunks for k, o in table.owned.items()} == self.owned
        assert {k: d.chunks for k, d in table.doomed.items()} == {k: v.chunks for k, v in self.vacating.items()}
        assert set(self.memory) <= set(everyone), "memory without an owner"
        waiting = any(e.wants for e in self.played.state.entries.values())
        pending = any(d.keep for d in table.doomed.values())
        assert waiting or pending or table.charged <= table.budget, "over the budget"

    def teardown(self) -> None:
        """After all releases and runs no caller waits; only cached weights have memory."""
        if not hasattr(self, "played"):
            return
        for n in range(6):
            self.do(Release(self.number("release"), f"i{n}"))
        while self.running or self.vacating or self.closing:
            for number in list(self.closing):
                self.closing.remove(number)
                self.do(ArenaClosed(number, 1))
            for run in list(self.running):
                weights_id = self.running.pop(run)
                self.do(Ended(weights_id, run))
            for order in list(self.vacating.values()):
                self.given_back(order)
        assert all(e.stage is Stage.CACHED for e in self.played.state.entries.values())
        assert self.answered == self.replies.keys()
        table = self.played.state.chunks
        assert sum(self.memory.values()) == table.cached_bytes + table.spare_bytes == table.charged <= table.budget


Shell.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=50, deadline=None)
TestShell = Shell.TestCase
