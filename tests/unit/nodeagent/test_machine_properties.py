"""Whatever happens in whatever order: no byte is booked twice or given back early, and every instance comes to an end."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.nodeagent.domain import events as e
from services.nodeagent.domain.state import Instance, NodeState, Process
from shared.contracts.node import InstanceState
from shared.errors import InstanceBusy
from tests.unit.nodeagent.world import EPOCH, ERROR, World, report, start, stop

IDS = st.sampled_from([f"i{n}" for n in range(5)])
DEVICES = ("d0", "d1")
SETS = st.sampled_from([("d0",), ("d1",), ("d0", "d1")])
ENDED = (InstanceState.STOPPED, InstanceState.FAILED)


class NodeMachine(RuleBasedStateMachine):
    """The outside world is kept apart from the node's idea of it: `alive` are processes, `held` are weights at the loader."""

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
        self.token = EPOCH

    def hear(self, event: e.Event, after: float = 0.0) -> None:
        before = self.world.state
        for effect in self.world.hear(event, after):
            match effect:
                case e.Fork():
                    assert effect.instance_id not in self.alive
                    assert effect.instance_id not in self.forking
                    self.forking.add(effect.instance_id)
                    self.held.add(effect.instance_id)
                case e.Signal(signal="kill"):
                    self.killed.add(effect.instance_id)
                case e.Reply():
                    assert effect.reply in self.asked
                    assert effect.reply not in self.answered, "answered twice"
                    self.answered.add(effect.reply)
                case e.Persist():
                    assert effect.instance_id in self.world.state.instances
                case _:
                    pass
        self.check_given_back(before)

    def check_given_back(self, before: NodeState) -> None:
        for gone in set(before.ledger.bookings) - set(self.world.state.ledger.bookings):
            assert gone not in self.alive, "given back while the process lives"
            assert gone not in self.forking
            assert gone not in self.held, "given back while its weights are held"

    def ask(self) -> int:
        reply = next(self.replies)
        self.asked.add(reply)
        return reply

    @rule(instance_id=IDS, devices=SETS, reserve=st.integers(1, 150), newer=st.integers(-1, 1))
    def start(self, instance_id: str, devices: tuple[str, ...], reserve: int, newer: int) -> None:
        self.token += max(0, newer)
        self.hear(
            e.StartCommand(start(instance_id, token=self.token + min(0, newer), reserve=reserve, devices=devices), self.ask())
        )

    @rule(instance_id=IDS, only_if_idle=st.booleans(), drain=st.sampled_from([0, 1000, 60_000]))
    def stop(self, instance_id: str, only_if_idle: bool, drain: int) -> None:
        command = stop(instance_id, token=self.token, only_if_idle=only_if_idle, drain_timeout_ms=drain)
        self.hear(e.StopCommand(command, self.ask()))

    @precondition(lambda self: bool(self.forking))
    @rule(data=st.data(), fails=st.booleans())
    def forked(self, data: st.DataObject, fails: bool) -> None:
        instance_id = data.draw(st.sampled_from(sorted(self.forking)))
        self.forking.discard(instance_id)
        if fails:
            self.hear(e.ForkFailed(instance_id, ERROR))
        else:
            self.alive[instance_id] = next(self.pids)
            self.hear(e.EngineForked(instance_id, self.alive[instance_id], 1))

    @rule(instance_id=IDS, state=st.sampled_from(["loading", "ready", "draining", "stopped", "failed"]), progress=st.floats(0, 1))
    def reported(self, instance_id: str, state: str, progress: float) -> None:
        pid = self.alive.get(instance_id, 1)
        self.hear(e.EngineReported(report(instance_id, state, pid, progress)))  # type: ignore[arg-type]  # drawn from its literals

    @rule(instance_id=IDS, only_if_idle=st.booleans(), error=st.sampled_from([None, ERROR, InstanceBusy().body()]))
    def drain_answered(self, instance_id: str, only_if_idle: bool, error: None) -> None:
        self.hear(e.DrainAnswered(instance_id, only_if_idle, error))

    @precondition(lambda self: bool(self.alive))
    @rule(data=st.data(), returncode=st.sampled_from([0, 1, -9, None]))
    def exits(self, data: st.DataObject, returncode: int | None) -> None:
        instance_id = data.draw(st.sampled_from(sorted(self.alive)))
        self.exit(instance_id, returncode)

    def exit(self, instance_id: str, returncode: int | None) -> None:
        self.hear(e.EngineExited(instance_id, self.alive.pop(instance_id), returncode, ERROR))
        self.killed.discard(instance_id)

    @rule(instance_id=IDS)
    def memory_proved(self, instance_id: str) -> None:
        if instance_id not in self.alive and instance_id not in self.forking:
            self.hear(e.MemoryProved(instance_id, 1))

    @rule(instance_id=IDS, works=st.booleans())
    def released(self, instance_id: str, works: bool) -> None:
        instance = self.world.state.instances.get(instance_id)
        if instance is None or instance.process is not Process.GONE:
            return
        if works:
            self.held.discard(instance_id)
            self.hear(e.WeightsReleased(instance_id, 1))
        else:
            self.hear(e.ReleaseFailed(instance_id, ERROR))

    @rule(loaded=st.dictionaries(IDS, st.integers(0, 100)))
    def loader_heard(self, loaded: dict[str, int]) -> None:
        self.hear(e.LoaderHeard(loaded))

    @rule(seconds=st.sampled_from([0.1, 1, 6, 30, 101]))
    def time_passes(self, seconds: float) -> None:
        self.hear(e.Tick(), seconds)

    @rule()
    def shutdown(self) -> None:
        self.hear(e.Shutdown(5.0))

    @rule()
    def agent_is_replaced(self) -> None:
        """kill -9: what was in memory only is lost; records, processes and the loader's holders are not."""
        old = self.world
        records = [Instance.model_validate_json(i.model_dump_json()) for i in old.state.instances.values()]
        self.asked -= self.asked - self.answered
        self.world = World(*DEVICES)
        self.world.now = old.now
        self.world.state = NodeState(self.world.state.ledger, self.world.state.policy, newest_epoch=old.state.newest_epoch)
        for record in records:
            if record.instance_id in self.forking:
                self.forking.discard(record.instance_id)  # the launcher found no process for it
            pid = self.alive.get(record.instance_id)
            self.hear(e.Adopted(record.model_copy(update={"pid": pid}), pid is not None, ERROR))

    @invariant()
    def never_over_budget(self) -> None:
        for device in DEVICES:
            assert self.world.state.ledger.reserved(device) <= 100

    @invariant()
    def what_lives_is_booked(self) -> None:
        for instance_id in {*self.alive, *self.forking}:
            assert instance_id in self.world.state.ledger.bookings

    @invariant()
    def only_what_is_there_is_booked(self) -> None:
        for instance_id in self.world.state.ledger.bookings:
            assert self.world.state.instances[instance_id].ended_at is None

    def teardown(self) -> None:
        """From any state: after a stop, with processes that obey SIGKILL and a loader that answers, everything ends."""
        for instance_id in list(self.world.state.instances):
            self.hear(e.StopCommand(stop(instance_id, token=self.token, drain_timeout_ms=0), self.ask()))
        for _ in range(6):
            for instance_id in sorted(self.forking):
                self.forking.discard(instance_id)
                self.alive[instance_id] = next(self.pids)
                self.hear(e.EngineForked(instance_id, self.alive[instance_id], 1))
            self.hear(e.Tick(), 6)
            for instance_id in sorted(self.killed & set(self.alive)):
                self.exit(instance_id, -9)
        assert not self.alive
        for instance in list(self.world.state.instances.values()):
            self.held.discard(instance.instance_id)
            self.hear(e.WeightsReleased(instance.instance_id, 1))
            self.hear(e.MemoryProved(instance.instance_id, 1))
        assert all(i.state in ENDED for i in self.world.state.instances.values())
        assert self.world.state.ledger.bookings == {}
        for instance_id in {i for i, _ in self.world.state.idle_asks.items()}:
            self.hear(e.DrainAnswered(instance_id, True, ERROR))
        assert self.answered >= self.asked, "a command was never answered"


TestNode = NodeMachine.TestCase
TestNode.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
