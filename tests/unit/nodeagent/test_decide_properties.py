"""Node invariants under any sequence of events.

No byte is booked twice or returned early, and every instance ends.
"""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.nodeagent.domain import events as e
from services.nodeagent.domain.state import Instance, NodeState, Process, deadlines
from shared.contracts.node import InstanceState
from shared.errors import InstanceBusy
from tests.support.examples import examples
from tests.unit.nodeagent.world import EPOCH, ERROR, POSSIBLE, World, report, resume, start, stop, suspend

IDS = st.sampled_from([f"i{n}" for n in range(5)])
DEVICES = ("d0", "d1")
SETS = st.sampled_from([("d0",), ("d1",), ("d0", "d1")])
ENDED = (InstanceState.STOPPED, InstanceState.FAILED)


class NodeMachine(RuleBasedStateMachine):
    """A node under random events.

    The real state is separate from the node's view of it.

    Attributes:
        alive: Processes by instance.
        held: Instances whose weights are attached at the loader.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World(*DEVICES)
        self.pids = itertools.count(100)
        self.replies = itertools.count(1)
        self.asked: set[int] = set()
        self.answered: set[int] = set()
        self.forking: set[str] = set()
        self.alive: dict[str, int] = {}
        self.killed: set[str] = set()
        self.held: set[str] = set()
        self.reserve: dict[str, tuple[tuple[str, ...], int]] = {}
        self.suspending: set[str] = set()
        self.resuming: set[str] = set()
        self.frozen: set[str] = set()
        self.token = EPOCH

    def receive(self, event: e.Event, after: float = 0.0) -> None:
        before = self.world.state
        for effect in self.world.receive(event, after):
            match effect:
                case e.Fork():
                    assert effect.instance_id not in self.alive
                    assert effect.instance_id not in self.forking
                    self.forking.add(effect.instance_id)
                    self.held.add(effect.instance_id)
                case e.Signal(signal="kill"):
                    self.killed.add(effect.instance_id)
                case e.Suspend():
                    assert effect.instance_id in self.alive
                    assert effect.instance_id not in self.suspending | self.resuming | self.frozen, "suspended twice"
                    self.suspending.add(effect.instance_id)
                case e.Resume():
                    assert effect.instance_id in self.alive
                    assert effect.instance_id not in self.suspending | self.resuming, "resumed while it is being suspended"
                    self.resuming.add(effect.instance_id)
                case e.Reply():
                    assert effect.reply in self.asked
                    assert effect.reply not in self.answered, "answered twice"
                    self.answered.add(effect.reply)
                case e.Persist():
                    assert effect.instance_id in self.world.state.instances
                case _:
                    pass
        self.check_given_back(before)
        self.check_shrunk(before, event)

    def check_shrunk(self, before: NodeState, event: e.Event) -> None:
        for instance_id, was in before.ledger.bookings.items():
            now = self.world.state.ledger.bookings.get(instance_id)
            if now is not None and now.bytes_each < was.bytes_each:
                assert isinstance(event, e.Suspended | e.Resumed | e.EngineExited), "bytes granted that were not proved free"

    def check_given_back(self, before: NodeState) -> None:
        for gone in set(before.ledger.bookings) - set(self.world.state.ledger.bookings):
            assert gone not in self.alive, "given back while the process lives"
            assert gone not in self.forking
            assert gone not in self.held, "given back while its weights are held"

    def ask(self) -> int:
        reply = next(self.replies)
        self.asked.add(reply)
        return reply

    @rule(
        instance_id=IDS,
        devices=SETS,
        reserve=st.integers(1, 150),
        newer=st.integers(-1, 1),
        wait_ms=st.sampled_from([0, 0, 20_000]),
    )
    def start(self, instance_id: str, devices: tuple[str, ...], reserve: int, newer: int, wait_ms: int) -> None:
        self.token += max(0, newer)
        command = start(instance_id, token=self.token + min(0, newer), reserve=reserve, devices=devices)
        self.receive(e.StartCommand(command.model_copy(update={"wait_ms": wait_ms, "park": wait_ms > 0}), self.ask()))

    @rule(instance_id=IDS, only_if_idle=st.booleans(), drain=st.sampled_from([0, 1000, 60_000]))
    def stop(self, instance_id: str, only_if_idle: bool, drain: int) -> None:
        command = stop(instance_id, token=self.token, only_if_idle=only_if_idle, drain_timeout_ms=drain)
        self.receive(e.StopCommand(command, self.ask()))

    @rule(instance_id=IDS, only_if_idle=st.booleans(), drain=st.sampled_from([0, 1000, 60_000]))
    def suspend(self, instance_id: str, only_if_idle: bool, drain: int) -> None:
        command = suspend(instance_id, token=self.token, only_if_idle=only_if_idle, drain_timeout_ms=drain)
        self.receive(e.SuspendCommand(command, self.ask()))

    @rule(instance_id=IDS, wait_ms=st.sampled_from([0, 20_000]), priority=st.integers(0, 1))
    def resume(self, instance_id: str, wait_ms: int, priority: int) -> None:
        command = resume(instance_id, token=self.token, wait_ms=wait_ms, priority=priority)
        self.receive(e.ResumeCommand(command, self.ask()))

    @rule(instance_id=IDS, snapshot=st.integers(0, 130), possible=st.booleans())
    def assessed(self, instance_id: str, snapshot: int, possible: bool) -> None:
        outlook = POSSIBLE.model_copy(update={"snapshot_bytes": snapshot, "resume_s": 0.0, "way": "cpu" if possible else None})
        self.receive(e.Assessed(instance_id, outlook, 1))

    @rule(instance_id=IDS, only_if_idle=st.booleans(), error=st.sampled_from([None, None, InstanceBusy().body(), ERROR]))
    def hold_answered(self, instance_id: str, only_if_idle: bool, error: None) -> None:
        self.receive(e.PauseAnswered(instance_id, only_if_idle, error))

    @precondition(lambda self: bool(self.suspending))
    @rule(data=st.data(), left=st.integers(0, 30), snapshot=st.integers(0, 130), works=st.booleans())
    def is_suspended(self, data: st.DataObject, left: int, snapshot: int, works: bool) -> None:
        instance_id = data.draw(st.sampled_from(sorted(self.suspending)))
        self.suspending.discard(instance_id)
        if not works:
            self.receive(e.SuspendFailed(instance_id, ERROR))
            return
        if instance_id in self.alive:
            self.frozen.add(instance_id)
        booked = self.world.state.ledger.bookings.get(instance_id)
        left = min(left, booked.bytes_each) if booked is not None else left
        self.receive(e.Suspended(instance_id, 1, left, left + 1, snapshot))

    @precondition(lambda self: bool(self.resuming))
    @rule(data=st.data(), works=st.booleans())
    def is_resumed(self, data: st.DataObject, works: bool) -> None:
        instance_id = data.draw(st.sampled_from(sorted(self.resuming)))
        self.resuming.discard(instance_id)
        self.frozen.discard(instance_id)
        self.receive(e.Resumed(instance_id, 1) if works else e.ResumeFailed(instance_id, ERROR))

    @precondition(lambda self: bool(self.forking))
    @rule(data=st.data(), fails=st.booleans())
    def forked(self, data: st.DataObject, fails: bool) -> None:
        instance_id = data.draw(st.sampled_from(sorted(self.forking)))
        self.forking.discard(instance_id)
        if fails:
            self.receive(e.ForkFailed(instance_id, ERROR))
        else:
            self.alive[instance_id] = next(self.pids)
            self.receive(e.EngineForked(instance_id, self.alive[instance_id], 1))

    @rule(instance_id=IDS, state=st.sampled_from(["loading", "ready", "draining", "stopped", "failed"]), progress=st.floats(0, 1))
    def reported(self, instance_id: str, state: str, progress: float) -> None:
        pid = self.alive.get(instance_id, 1)
        self.receive(e.EngineReported(report(instance_id, state, pid, progress)))  # type: ignore[arg-type]  # drawn from its literals

    @rule(instance_id=IDS, only_if_idle=st.booleans(), error=st.sampled_from([None, ERROR, InstanceBusy().body()]))
    def drain_answered(self, instance_id: str, only_if_idle: bool, error: None) -> None:
        self.receive(e.DrainAnswered(instance_id, only_if_idle, error))

    @precondition(lambda self: bool(self.alive))
    @rule(data=st.data(), returncode=st.sampled_from([0, 1, -9, None]))
    def exits(self, data: st.DataObject, returncode: int | None) -> None:
        instance_id = data.draw(st.sampled_from(sorted(self.alive)))
        self.exit(instance_id, returncode)

    def exit(self, instance_id: str, returncode: int | None) -> None:
        self.frozen.discard(instance_id)
        self.suspending.discard(instance_id)
        self.resuming.discard(instance_id)
        self.receive(e.EngineExited(instance_id, self.alive.pop(instance_id), returncode, ERROR))
        self.killed.discard(instance_id)

    @rule(instance_id=IDS)
    def memory_proved(self, instance_id: str) -> None:
        if instance_id not in self.alive and instance_id not in self.forking:
            self.receive(e.MemoryFreed(instance_id, 1))

    @rule(instance_id=IDS, works=st.booleans())
    def released(self, instance_id: str, works: bool) -> None:
        instance = self.world.state.instances.get(instance_id)
        if instance is None or instance.process is not Process.GONE:
            return
        if works:
            self.held.discard(instance_id)
            self.receive(e.WeightsReleased(instance_id, 1))
        else:
            self.receive(e.ReleaseFailed(instance_id, ERROR))

    @rule(loaded=st.dictionaries(IDS, st.integers(0, 100)))
    def loader_reported(self, loaded: dict[str, int]) -> None:
        self.receive(e.LoaderReported(loaded))

    @rule(seconds=st.sampled_from([0.1, 1, 6, 30, 101]))
    def time_passes(self, seconds: float) -> None:
        self.receive(e.Tick(), seconds)
        late = [t for t in deadlines(self.world.state) if t <= self.world.now]
        assert not late, "a deadline that is over and stays: the loop would spin"

    @rule()
    def shutdown(self) -> None:
        self.receive(e.Shutdown(5.0))

    @rule()
    def agent_is_replaced(self) -> None:
        """SIGKILL of the agent: only its memory is lost.

        Records, processes and the loader's holders survive.
        """
        old = self.world
        records = [Instance.model_validate_json(i.model_dump_json()) for i in old.state.instances.values()]
        self.asked -= self.asked - self.answered
        self.frozen |= self.suspending  # the instance may have reached that state
        self.suspending, self.resuming = set(), set()
        self.world = World(*DEVICES)
        self.world.now = old.now
        self.world.state = NodeState(
            self.world.state.ledger,
            self.world.state.policy,
            newest_epoch=old.state.newest_epoch,
            snapshot_budget=old.state.snapshot_budget,
        )
        for record in records:
            if record.instance_id in self.forking:
                self.forking.discard(record.instance_id)  # the launcher found no process for it
            pid = self.alive.get(record.instance_id)
            self.receive(
                e.Adopted(record.model_copy(update={"pid": pid}), pid is not None, ERROR, record.instance_id in self.frozen)
            )

    @invariant()
    def never_over_budget(self) -> None:
        for device in DEVICES:
            assert self.world.state.ledger.sum_reserved(device) <= 100

    @invariant()
    def snapshots_within_their_budget(self) -> None:
        assert self.world.state.snapshot_bytes_except("") <= self.world.state.snapshot_budget

    @invariant()
    def what_serves_is_not_frozen(self) -> None:
        for instance in self.world.state.instances.values():
            if instance.state is InstanceState.READY:
                assert instance.instance_id not in self.frozen
            if instance.state.parked and instance.process is Process.ALIVE:
                assert instance.instance_id in self.frozen

    @invariant()
    def what_lives_is_booked(self) -> None:
        for instance_id in {*self.alive, *self.forking}:
            assert instance_id in self.world.state.ledger.bookings

    @invariant()
    def only_what_is_there_is_booked(self) -> None:
        for instance_id in self.world.state.ledger.bookings:
            assert self.world.state.instances[instance_id].ended_at is None

    def teardown(self) -> None:
        """From any state everything ends after a stop.

        Processes obey SIGKILL, and the loader replies.
        """
        for instance_id in list(self.world.state.instances):
            self.receive(e.StopCommand(stop(instance_id, token=self.token, drain_timeout_ms=0), self.ask()))
        for _ in range(6):
            for instance_id in sorted(self.forking):
                self.forking.discard(instance_id)
                self.alive[instance_id] = next(self.pids)
                self.receive(e.EngineForked(instance_id, self.alive[instance_id], 1))
            self.receive(e.Tick(), 6)
            for instance_id in sorted(self.killed & set(self.alive)):
                self.exit(instance_id, -9)
        assert not self.alive
        for instance in list(self.world.state.instances.values()):
            self.held.discard(instance.instance_id)
            self.receive(e.WeightsReleased(instance.instance_id, 1))
            self.receive(e.MemoryFreed(instance.instance_id, 1))
        assert all(i.state in ENDED for i in self.world.state.instances.values())
        assert self.world.state.ledger.bookings == {}
        for instance_id in {i for i, _ in self.world.state.idle_waiters.items()}:
            self.receive(e.DrainAnswered(instance_id, True, ERROR))
        for instance_id in {i for i, _ in self.world.state.pause_waiters.items()}:
            self.receive(e.PauseAnswered(instance_id, True, ERROR))
        assert self.answered >= self.asked, "a command was never answered"


TestNode = NodeMachine.TestCase
TestNode.settings = settings(max_examples=examples(80), stateful_step_count=50, deadline=None)
