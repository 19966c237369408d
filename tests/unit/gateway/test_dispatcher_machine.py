"""Any sequence of events: no request is lost or answered twice, and no slot leaks."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.ticket import Stage, Ticket
from shared.contracts.demand import LoadFailed
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed, InstanceDraining, Unreachable
from tests.support.examples import examples
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket

MODELS = ("m", "n")
INSTANCES = ("i", "j", "k")
MODEL_OF = {"i": "m", "j": "m", "k": "n"}


class DispatcherMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.world = RecordedEffects()
        self.dispatcher = Dispatcher("gw", self.world)
        self.now = 0.0
        self.names = itertools.count()
        self.all: dict[str, Ticket] = {}
        self.answered: set[str] = set()
        self.left: set[str] = set()

    @rule(target=requests, model=st.sampled_from(MODELS))
    def ask(self, model: str) -> Ticket:
        made = ticket(f"r{next(self.names)}", model, self.now, wait=20, response=60)
        self.all[made.id] = made
        self.dispatcher.on_request(made, 3, self.now)
        return made

    @rule(states=st.lists(st.sampled_from([None, *InstanceState]), min_size=3, max_size=3), boot=st.sampled_from("ab"))
    def hear(self, states: list[InstanceState | None], boot: str) -> None:
        known = [instance(n, MODEL_OF[n], s) for n, s in zip(INSTANCES, states, strict=True) if s is not None]
        self.dispatcher.on_status(status(*known, boot=boot), self.now)

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 5.5, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.dispatcher.on_tick(self.now)

    @rule(request=requests)
    def begin(self, request: Ticket) -> None:
        if request.stage is Stage.SENT:
            self.dispatcher.on_message(request, self.now)
            request.is_committed = True

    @rule(request=consumes(requests))
    def finish(self, request: Ticket) -> None:
        if request.stage is Stage.SENT:
            self.answered.add(request.id)
            self.dispatcher.on_finished(request, self.now)

    @rule(request=requests, draining=st.booleans())
    def refuse(self, request: Ticket, draining: bool) -> None:
        if not request.is_committed:
            self.dispatcher.on_refused(request, InstanceDraining() if draining else Unreachable(), self.now)

    @rule(request=consumes(requests))
    def leave(self, request: Ticket) -> None:
        if request.stage is not Stage.DONE:
            self.left.add(request.id)
        self.dispatcher.on_cancel(request, self.now)

    @rule(model=st.sampled_from(MODELS))
    def fail_load(self, model: str) -> None:
        is_ready = any(route.is_ready for route in self.dispatcher.routes.iter_routes(model))
        waiting = self.dispatcher.count_waiting(model)
        self.dispatcher.on_load_failed(LoadFailed(model=model, error=EngineFailed("no").body()), self.now)
        assert self.dispatcher.count_waiting(model) == (waiting if is_ready else 0)

    @invariant()
    def every_request_is_in_exactly_one_place(self) -> None:
        for name, made in self.all.items():
            ends = [name in self.answered, name in self.left, name in self.world.failed]
            assert sum(ends) == (1 if made.stage is Stage.DONE else 0), (name, made.stage, ends)

    @invariant()
    def what_waits_is_known_to_the_scheduler(self) -> None:
        for model in MODELS:
            waiting = sum(t.model == model and t.stage is Stage.QUEUED for t in self.all.values())
            assert waiting == self.dispatcher.count_waiting(model)
            published = [d.waiting for d in self.world.demands if d.model == model]
            assert bool(waiting) == bool(published and published[-1])

    @invariant()
    def slots_are_counted(self) -> None:
        sent = [t for t in self.all.values() if t.stage is Stage.SENT]
        assert sum(self.dispatcher.count_in_flight(m) for m in MODELS) == len(sent)
        for route in self.dispatcher.routes.iter_all():
            assert route.own == sum(t.instance_id == route.status.instance_id for t in sent)
            assert route.own <= route.limit


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
