"""Simulate a gateway: queue requests by model, and report demand.

A request goes to the ready instance with the fewest requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.contracts.demand import ARRIVALS_WINDOW_S, DEMAND_INTERVAL_S, Demand
from shared.contracts.objectives import ReportObjectives
from shared.contracts.phases import Phase, PhaseSpan
from shared.telemetry.critical_path import critical_path
from simulator.instances import Run, SimModel
from simulator.mesh.machine import MeshInstance
from simulator.mesh.objectives import Objectives
from simulator.report import Served
from simulator.workloads.request import Request
from simulator.world import World

WINDOWS = 8
"""Windows whose maximum is the peak (services/gateway/domain/arrivals.py)."""


@dataclass
class _Queue:
    """The waiting requests of a model, and its open instances."""

    model: SimModel
    waiting: deque[Run] = field(default_factory=deque)
    routes: dict[str, MeshInstance] = field(default_factory=dict)
    reported_at: float | None = None
    arrivals_at: deque[float] = field(default_factory=deque)

    def arrivals(self, now: float) -> tuple[int, int]:
        """Return the requests of the last window, and of the fullest recent one."""
        present = int(now // ARRIVALS_WINDOW_S)
        while self.arrivals_at and self.arrivals_at[0] // ARRIVALS_WINDOW_S < present - WINDOWS:
            self.arrivals_at.popleft()
        whole = Counter(n for at in self.arrivals_at if (n := int(at // ARRIVALS_WINDOW_S)) < present)
        return sum(at > now - ARRIVALS_WINDOW_S for at in self.arrivals_at), max(whole.values(), default=0)


class Gateway:
    """The gateway.

    Args:
        world: The models and the clock.
        send_demand: Sends demand to the scheduler.
        send_objectives: Sends the counts of requests with an objective to the scheduler.
        on_load_changed: Called when an engine's load has changed.
    """

    def __init__(
        self,
        world: World,
        send_demand: Callable[[Demand], None],
        send_objectives: Callable[[ReportObjectives], None],
        on_load_changed: Callable[[MeshInstance], None],
    ) -> None:
        self._world, self._send_demand, self._on_load_changed = world, send_demand, on_load_changed
        self._objectives = Objectives(world.clock, send_objectives)
        self._queues = {name: _Queue(model) for name, model in world.models.items()}
        self.open = 0
        """Requests without an answer so far."""

    def arrive(self, request: Request, number: int) -> None:
        model = self._world.models[request.model]
        run = Run(request, number, model)
        self.open += 1
        queue = self._queues[model.name]
        queue.waiting.append(run)
        queue.arrivals_at.append(self._world.clock.now)
        self._dispatch(queue)
        if run.waiting:
            self._limit_wait(run)

    def requeue(self, runs: list[Run]) -> None:
        """Queue requests that lost their instance before all others of their model."""
        for run in sorted(runs, key=lambda r: r.number, reverse=True):
            run.waiting = True
            self._queues[run.model.name].waiting.appendleft(run)
        for name in dict.fromkeys(r.model.name for r in runs):
            self._dispatch(self._queues[name])
        for run in runs:
            if run.waiting:
                self._limit_wait(run)

    def on_routed(self, instance: MeshInstance) -> None:
        queue = self._queues[instance.model]
        queue.routes[instance.key] = instance
        self._dispatch(queue)

    def on_unrouted(self, instance: MeshInstance) -> None:
        self._queues[instance.model].routes.pop(instance.key, None)

    def on_answered(self, run: Run) -> None:
        now, model = self._world.clock.now, run.model
        assert run.begun is not None
        first = (run.first_at if run.first_at is not None else now) + self._world.runtime.reply_ms / 1e3
        ttft = first - run.arrived
        ended = now + self._world.runtime.reply_ms / 1e3
        tpot = (ended - first) / (run.output - 1) if run.output > 1 and ended > first else 0.0
        in_time = ttft <= model.group.slo_ttft
        served = Served(
            model.name, run.arrived, run.begun - run.arrived, ttft, tpot, in_time, run.pause, ended, run.cold, run.number
        )
        self._world.outcome.served.append(served)
        self._objectives.count(model, served)
        self._trace(run, first)
        run.instance = None
        self.open -= 1
        self._dispatch(self._queues[model.name])

    def _trace(self, run: Run, first: float) -> None:
        """Return the critical path of a TTFT (services/gateway/telemetry/request_log.py)."""
        arrived, queue = run.arrived, self._queues[run.model.name]
        route = queue.routes.get(run.instance.key) if run.instance is not None else None
        begun = run.begun if run.begun is not None else first
        if run.cold and route is not None:
            # A prompt that is computed during the load waits for the weights until its end.
            loaded = max((end for phase, _, end in route.phases if phase is Phase.LOAD), default=begun)
            spans = [
                *route.phases,
                (Phase.QUEUE, route.engine.ready_at, begun),
                (Phase.PREFILL, max(begun, min(loaded, first)), first),
            ]
        else:
            spans = [(Phase.QUEUE, arrived, begun), (Phase.PREFILL, begun, first)]
        measured = (PhaseSpan(phase=p, start_ms=(b - arrived) * 1e3, duration_ms=max(0.0, e - b) * 1e3) for p, b, e in spans)
        path = self._world.outcome.paths[run.number] = {}
        for part in critical_path(measured, 0.0, (first - arrived) * 1e3):
            path[part.phase.value] = path.get(part.phase.value, 0.0) + part.duration_ms / 1e3

    def fail_waiting(self, name: str) -> None:
        """Fail the waiting requests of a model that the scheduler cannot make ready."""
        queue = self._queues[name]
        for run in queue.waiting:
            self._give_up(run)
            self._world.outcome.failed += 1
        queue.waiting.clear()
        self._report_demand(queue)

    def _limit_wait(self, run: Run) -> None:
        """Fail a waiting request after `timeout_s`; if it loses its instance, it waits again.

        services/gateway/domain/dispatcher.py has the same rule.
        """
        clock = self._world.clock
        run.deadline = clock.now + self._world.runtime.timeout_s
        clock.at(run.deadline, lambda: self._timed_out(self._queues[run.model.name], run))

    def _timed_out(self, queue: _Queue, run: Run) -> None:
        if run.waiting and self._world.clock.now >= run.deadline:
            queue.waiting.remove(run)
            self._give_up(run)
            self._world.outcome.timed_out += 1
            if not queue.waiting:
                self._report_demand(queue)

    def _give_up(self, run: Run) -> None:
        run.waiting = False
        self.open -= 1
        self._world.outcome.given_up.append((run.model.name, run.arrived, run.number))
        self._objectives.count(run.model, None)

    def _dispatch(self, queue: _Queue) -> None:
        while queue.waiting:
            free = [i for i in queue.routes.values() if i.engine.open]
            if not free:
                break
            self._serve(min(free, key=lambda i: (len(i.engine.runs), i.key)), queue.waiting.popleft())
        if (queue.reported_at is None) == bool(queue.waiting):
            self._report_demand(queue)

    def _serve(self, instance: MeshInstance, run: Run) -> None:
        if run.begun is None:
            run.cold = instance.engine.ready_at > run.arrived
        instance.engine.admit(run)
        self._on_load_changed(instance)

    def _report_demand(self, queue: _Queue) -> None:
        """Report demand: with the first waiting request, every second, and at the end.

        The end is when no request waits any more.
        """
        now, waiting = self._world.clock.now, len(queue.waiting)
        queue.reported_at = now if waiting else None
        oldest = (now - min(r.arrived for r in queue.waiting)) * 1e3 if waiting else 0.0
        flying = sum(len(i.engine.runs) for i in queue.routes.values())
        window, peak = queue.arrivals(now)
        self._send_demand(
            Demand(
                gateway="g",
                model=queue.model.name,
                waiting=waiting,
                in_flight=flying,
                oldest_wait_ms=int(oldest),
                window=window,
                peak=peak,
            )
        )
        if waiting:
            reported = queue.reported_at
            self._world.clock.call_later(
                DEMAND_INTERVAL_S, lambda: self._report_demand(queue) if queue.reported_at == reported else None
            )
