"""The supervisor's decisions: start and stop order, back-off, escalation."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from thaw.launcher.lifecycle import (
    DUMP_S,
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    RUNNING,
    STEADY_AFTER_S,
    Abort,
    Effect,
    Event,
    Exited,
    Finished,
    Hung,
    Kill,
    Launch,
    Mesh,
    Ready,
    Service,
    StopRequested,
    Terminate,
    Tick,
    decide,
    delay_after,
)

SERVERS = (Service("postgres", stop_rank=4), Service("nats", stop_rank=5))
AFTER = ("postgres", "nats")
REST = (Service("gateway", AFTER, 0), Service("nodeagent", AFTER, 1), Service("loader", AFTER, 2), Service("scheduler", AFTER, 3))


def play(mesh: Mesh, events: Iterable[Event], now: float = 0.0) -> tuple[Mesh, list[Effect]]:
    effects: list[Effect] = []
    for event in events:
        mesh, more = decide(mesh, event, now)
        effects += more
    return mesh, effects


def running() -> Mesh:
    events: list[Event] = [Tick(), *(Ready(s.name) for s in SERVERS), *(Ready(s.name) for s in REST)]
    mesh, _ = play(Mesh.from_services((*SERVERS, *REST)), events)
    return mesh


def test_services_start_as_soon_as_their_servers_are_ready() -> None:
    mesh, effects = play(Mesh.from_services((*SERVERS, *REST)), [Tick()])
    assert effects == [Launch("postgres"), Launch("nats")]
    mesh, effects = play(mesh, [Ready("nats")])
    assert effects == []
    mesh, effects = play(mesh, [Ready("postgres")])
    assert {e.name for e in effects if isinstance(e, Launch)} == {"gateway", "nodeagent", "loader", "scheduler"}


def test_crashed_service_is_restarted_with_doubling_delay() -> None:
    mesh, now, delays = running(), 100.0, []
    for _ in range(8):
        mesh, effects = decide(mesh, Exited("gateway", 1), now)
        assert effects == ()
        delay = (mesh.next_deadline or 0) - now
        delays.append(round(delay, 3))
        mesh, effects = decide(mesh, Tick(), now + delay * 0.99)
        assert effects == ()
        now += delay
        mesh, effects = decide(mesh, Tick(), now)
        assert effects == (Launch("gateway"),)
    # The first crash follows a long run; the next ones follow each other.
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert mesh.services["gateway"].restarts == 8


def test_a_steady_run_forgives_earlier_failures() -> None:
    mesh, _ = play(running(), [Exited("gateway", 1)], 1.0)
    mesh, _ = decide(mesh, Tick(), 2.0)
    mesh, _ = decide(mesh, Exited("gateway", 1), 2.0 + STEADY_AFTER_S)
    assert mesh.services["gateway"].failures == 1


def test_crashed_server_is_restarted_without_its_dependents() -> None:
    mesh, effects = play(running(), [Exited("nats", -9)], 50.0)
    assert effects == []
    mesh, effects = play(mesh, [Tick()], 60.0)
    assert effects == [Launch("nats")]
    assert all(mesh.services[s.name].status == "ready" for s in REST)


def test_everything_stops_in_order() -> None:
    mesh, effects = play(running(), [StopRequested()])
    assert effects == [Terminate("gateway")]
    for name, following in (("gateway", "nodeagent"), ("nodeagent", "loader"), ("loader", "scheduler"), ("scheduler", "postgres")):
        mesh, effects = play(mesh, [Exited(name, 0)])
        assert effects == [Terminate(following)]
    mesh, effects = play(mesh, [Exited("postgres", 0), Exited("nats", 0)])
    assert effects == [Terminate("nats"), Finished()]


def test_service_that_does_not_stop_is_killed_once() -> None:
    mesh, _ = decide(running(), StopRequested(), 0.0)
    mesh, effects = decide(mesh, Tick(), 9.9)
    assert effects == ()
    mesh, effects = decide(mesh, Tick(), 10.0)
    assert effects == (Kill("gateway"),)
    mesh, effects = decide(mesh, Tick(), 11.0)
    assert effects == ()
    _, effects = decide(mesh, Exited("gateway", -9), 11.0)
    assert effects == (Terminate("nodeagent"),)


def test_hung_service_dumps_its_stacks_is_killed_and_restarted() -> None:
    mesh, effects = decide(running(), Hung("nodeagent", "event loop made no progress for 10 s"), 50.0)
    assert effects == (Abort("nodeagent"),)
    assert decide(mesh, Hung("nodeagent", "again"), 50.1)[1] == ()
    mesh, effects = decide(mesh, Tick(), 50.0 + DUMP_S / 2)
    assert effects == ()
    mesh, effects = decide(mesh, Tick(), 50.0 + DUMP_S)
    assert effects == (Kill("nodeagent", group=False),)  # the next nodeagent adopts its engines
    assert decide(mesh, Tick(), 60.0)[1] == ()
    mesh, _ = decide(mesh, Exited("nodeagent", -9), 60.0)
    mesh, effects = decide(mesh, Tick(), 61.0)
    assert effects == (Launch("nodeagent"),)
    service = mesh.services["nodeagent"]
    assert (service.restarts, service.hangs, service.last_hang) == (1, 1, "event loop made no progress for 10 s")


def test_hung_service_that_exits_by_itself_is_not_killed() -> None:
    mesh, _ = decide(running(), Hung("loader", "silent"), 50.0)
    mesh, effects = decide(mesh, Exited("loader", -6), 50.2)
    assert effects == ()
    mesh, effects = decide(mesh, Tick(), 50.0 + DUMP_S)
    assert effects == (Launch("loader"),)


def test_hung_service_is_killed_even_if_the_mesh_is_stopping() -> None:
    mesh, _ = decide(running(), Hung("scheduler", "silent"), 50.0)
    mesh, effects = decide(mesh, StopRequested(), 50.1)
    assert effects == (Terminate("gateway"),)
    mesh, effects = decide(mesh, Tick(), 51.0)
    assert effects == (Kill("scheduler", group=False),)
    assert mesh.next_deadline is not None
    assert mesh.next_deadline > 51.0  # the deadline does not repeat at once
    assert decide(mesh, Hung("gateway", "silent"), 52.0)[1] == ()  # a stopping service has its own bound


def test_a_stop_while_backing_off_does_not_restart() -> None:
    mesh, _ = play(running(), [Exited("gateway", 1)], 1.0)
    mesh, effects = decide(mesh, StopRequested(), 1.1)
    assert effects == (Terminate("nodeagent"),)
    assert decide(mesh, Tick(), 100.0)[1] == (Kill("nodeagent"),)


@given(st.integers(1, 1000))
def test_restart_delays_are_bounded(failures: int) -> None:
    assert FIRST_DELAY_S <= delay_after(failures) <= LONGEST_DELAY_S


class Supervision(RuleBasedStateMachine):
    """Supervision under any sequence of events.

    The supervisor launches no running process, and a stop ends with no process running.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mesh = Mesh.from_services((*SERVERS, *REST))
        self.now = 0.0
        self.alive: set[str] = set()
        self.finished = False

    def feed(self, event: Event) -> None:
        self.mesh, effects = decide(self.mesh, event, self.now)
        for effect in effects:
            match effect:
                case Launch(name):
                    assert name not in self.alive
                    assert not self.mesh.stopping
                    self.alive.add(name)
                case Terminate(name):
                    assert name in self.alive
                    assert self.mesh.stopping
                case Abort(name):
                    assert name in self.alive
                    assert not self.mesh.stopping
                case Kill(name, group):
                    assert name in self.alive
                    assert self.mesh.stopping or not group
                case Finished():
                    self.finished = True

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), code=st.sampled_from([0, 1, -9]))
    def a_process_ends(self, data: st.DataObject, code: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(name)
        self.feed(Exited(name, code))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_process_answers(self, data: st.DataObject) -> None:
        self.feed(Ready(data.draw(st.sampled_from(sorted(self.alive)))))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_process_hangs(self, data: st.DataObject) -> None:
        self.feed(Hung(data.draw(st.sampled_from(sorted(self.alive))), "silent"))

    @invariant()
    def a_deadline_that_is_over_has_been_met(self) -> None:
        self.feed(Tick())
        assert self.mesh.next_deadline is None or self.mesh.next_deadline > self.now

    @rule()
    def a_stop_is_asked_for(self) -> None:
        self.feed(StopRequested())

    @invariant()
    def what_runs_is_known(self) -> None:
        assert self.alive == {s.name for s in self.mesh.services.values() if s.status in RUNNING}

    @invariant()
    def finished_means_gone(self) -> None:
        assert not self.finished or not self.alive

    def teardown(self) -> None:
        self.feed(StopRequested())
        for _ in range(len(self.mesh.services) + 1):
            for name in sorted(self.alive):
                if self.mesh.services[name].status in ("terminating", "killed", "hung"):
                    self.alive.discard(name)
                    self.feed(Exited(name, 0))
        assert self.finished
        assert not self.alive


TestSupervision = Supervision.TestCase
