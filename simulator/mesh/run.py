"""The mesh in simulated time, with the scheduler's own `decide` on its own state.

One gateway and one migrator; a message takes `message_ms`, a decision `decision_ms`. Nodes report
changes at once, engine load within a tenth of a second, and everything every second while requests
are open. The machines are those of the plain simulator: shared links, batching engines, failing
nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import inf

from services.scheduler.domain.busy import is_busy, is_node_lost_soon
from services.scheduler.domain.decide import decide
from services.scheduler.domain.effects import (
    Effect,
    LoadEnded,
    OrderMigration,
    PublishLoadFailed,
    SendCancelPrefetch,
    SendExpectation,
    SendPrefetch,
    SendResume,
    SendStart,
    SendStop,
    SendSuspend,
)
from services.scheduler.domain.events import DemandBatch, DemandReceived, Event, ObjectivesReported, Recovered, Tick
from services.scheduler.domain.policies.port import Profile
from services.scheduler.domain.policy import LIVE, Policy
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Device, Model, Node
from shared.contracts.demand import Demand
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec, Slo
from shared.contracts.node import NODE_LOST_AFTER_S, STATUS_INTERVAL_S
from shared.contracts.objectives import ReportObjectives
from shared.contracts.phases import Phase
from simulator.clock import Timer
from simulator.config import GB, ClusterFile, ModelGroup
from simulator.failures import schedule_failures
from simulator.instances import Run, SimNode
from simulator.mesh.agents import Agents, Recorded, Spans, StartTimes
from simulator.mesh.gateway import Gateway
from simulator.mesh.idle_ticks import IdleTicks
from simulator.mesh.machine import MeshNode
from simulator.mesh.migrator import Migrator
from simulator.report import Outcome
from simulator.workloads.request import Request
from simulator.world import World

TICK_S = 0.25
IDLE_TICK_S = 1.0
"""Period of ticks while time alone changes nothing (services/scheduler/loop.py)."""
WAITED_S = 0.1
"""A plan made later than this after its demand arrived had to wait for room."""
Job = Callable[[], None]


def card_of(name: str, group: ModelGroup) -> ModelCard:
    spec = ModelSpec(
        name=name,
        source=f"s3://simulated/{name}",
        max_concurrency=group.capacity,
        keep_alive=group.keep_alive,
        memory=int((group.weights_gb + group.kv_gb) * GB),
        priority=group.priority,
        replicas={"min": group.replicas_min, "max": group.replicas_max},
        slo=Slo(
            ttft=group.slo_ttft if group.has_ttft_objective else None,
            tpot=group.slo_tpot,
            percentile=group.percentile,
        ),
        latency_sensitivity=group.sensitivity,
    )
    info = ModelInfo(
        source=spec.source,
        revision=name,
        architecture="simulated",
        model_type="simulated",
        task="generate",
        weights_bytes=int(group.weights_gb * GB),
        parameters=int(group.weights_gb * GB) // 2,
        dtype="bfloat16",
        context_length=4096,
        kv_bytes_per_token=1,
    )
    return ModelCard(spec=spec, info=info, created=0)


class Simulation:
    def __init__(
        self,
        cluster: ClusterFile,
        groups: Sequence[ModelGroup],
        profile: Profile | None = None,
        seed: int = 0,
        policy: Policy | None = None,
        usual: StartTimes | None = None,
        recorded: Recorded | None = None,
    ) -> None:
        """Create a run.

        Args:
            cluster: The machines.
            groups: The models.
            profile: Profile of the policy; None: that of `policy`.
            seed: Of all random choices.
            policy: Policy of a recorded mesh; None: the default.
            usual: Usual durations of starts; None: those of the cluster file.
            recorded: Durations of recorded starts, which take precedence.
        """
        given = policy or Policy()
        live = cluster.runtime.capabilities & (LIVE - {"pipeline"})  # simulated nodes run no stages
        fails = bool(cluster.failures.events) or cluster.failures.mtbf_s is not None
        self._policy = replace(
            given,
            profile=profile or given.profile,
            capabilities=live,
            # Nodes count as alive unless they have failed, even without messages.
            node_lost_after_s=NODE_LOST_AFTER_S if fails else inf,
            # Nodes have no queue of reservations: it would save the duration of one message.
            grant_wait_s=0.0,
            recovery_window_s=0.0,
            demand_grace_s=0.0,
        )
        self.world = World(cluster, groups, self._policy.profile, seed)
        self.world.can = live
        self.outcome = self.world.outcome
        self._clock, self._delay = self.world.clock, cluster.runtime.message_ms / 1e3
        self._decision = cluster.runtime.decision_ms / 1e3
        self._tick_at, self._next_tick = inf, Timer(lambda: None)
        self._idle_ticks = IdleTicks(self._policy)
        self._fails, self._coming = fails, 0
        self._pending_events: list[Event] = []
        self._deciding, self._sent = False, 0
        self.nodes = {name: MeshNode(sim, cluster.runtime) for name, sim in self.world.nodes.items()}
        self.agents = Agents(self.world, self.nodes, self._receive_later, usual, recorded)
        self._gateway = Gateway(self.world, self._send_demand, self._send_objectives, self.agents.on_load_changed)
        self.agents.listener = self._gateway
        self._migrator = Migrator(self.world, self.agents, self._gateway, self._receive_later)
        self.state = ClusterState(epoch=1, recovered_at=-1e6)
        apply(self.state, [Put(Model(card_of(m.name, m.group))) for m in self.world.models.values()])
        for node in self.nodes.values():
            devices = tuple(Device(f"cuda:{d.index}", "cuda", "", d.budget) for d in node.sim.devices)
            apply(self.state, [Put(Node(node.name, "b1", {}, devices))])

    @property
    def started(self) -> list[str]:
        """Return the models in the order of their starts and resumptions."""
        return self.agents.started

    def run(self, requests: Sequence[Request]) -> Outcome:
        self._decide(Recovered(0.0))
        for node in self.nodes.values():
            self.agents.report_loader(node)
            self.agents.report(node)
        self._clock.call_later(STATUS_INTERVAL_S, self._beat)
        for number, request in enumerate(requests):
            self._clock.at(request.at, partial(self._arrive, request, number))
        schedule_failures(self.world, self._fail)
        self._coming = len(requests)
        if requests:
            self._clock.run(until=lambda: not self._coming and not self._gateway.open)
        self._close(len(requests))
        return self.outcome

    def _arrive(self, request: Request, number: int) -> None:
        self._coming -= 1
        self._gateway.arrive(request, number)

    def _close(self, requests: int) -> None:
        now, outcome = self._clock.now, self.outcome
        outcome.ended_at = now
        for node in self.nodes.values():
            for instance in node.instances.values():
                if not instance.state.parked:
                    self.agents.count(instance)
            for device in node.sim.devices:
                device.busy_s += now - device.busy_since if device.busy else 0.0
            outcome.device_loads[node.name] = tuple(d.busy_s / now if now else 0.0 for d in node.sim.devices)
        outcome.lost = requests - len(outcome.served) - outcome.failed - outcome.timed_out

    def _beat(self) -> None:
        """Have nodes report every second while requests are open."""
        if self._gateway.open or self._fails or self.state.unschedulable or self.state.claimed:
            for node in self.nodes.values():
                self.agents.report(node)
                if node.sim.network.flows or self._fails:
                    self.agents.report_loader(node)
        self._clock.call_later(STATUS_INTERVAL_S, self._beat)

    # Nodes that fail.

    def _fail(self, sim: SimNode, seconds: float) -> None:
        node = self.nodes[sim.name]
        if not node.alive:
            return
        runs = self.agents.fail(node)
        self.outcome.restarts += len(runs)
        if self.world.runtime.failover == "restart":
            for run in runs:
                run.tokens = 0
        self._clock.call_later(self.world.runtime.noticed_s, lambda: self._requeue(runs))
        self._clock.call_later(seconds, lambda: self.agents.recover(node))

    def _requeue(self, runs: list[Run]) -> None:
        self._gateway.requeue(runs)

    # The scheduler.

    def _send_demand(self, demand: Demand) -> None:
        delay = self.world.runtime.gateway_ms / 1e3 + self._delay
        self._clock.call_later(delay, lambda: self._receive(DemandReceived(self._clock.now, demand, "w")))

    def _send_objectives(self, report: ReportObjectives) -> None:
        self._clock.call_later(self._delay, lambda: self._receive(ObjectivesReported(self._clock.now, report, "w")))

    def _receive_later(self, event: Event) -> None:
        self._clock.call_later(self._delay, lambda: self._receive(event))

    def _receive(self, event: Event) -> None:
        """Queue events that arrive during a decision; consecutive demand is merged
        (services/scheduler/loop.py).
        """
        self._pending_events.append(event)
        if not self._deciding:
            self._deciding = True
            self._clock.call_later(0.0, self._turn)

    def _turn(self) -> None:
        events, self._pending_events = self._pending_events, []
        before = self._sent
        for is_demand, run in groupby(events, key=lambda e: isinstance(e, DemandReceived)):
            some = list(run)
            demands = tuple(e for e in some if isinstance(e, DemandReceived))
            for event in (DemandBatch(self._clock.now, demands),) if is_demand and len(some) > 1 else some:
                self._decide(event)
        if self._sent > before or self._pending_events:
            self._clock.call_later(self._decision if self._sent > before else 0.0, self._on_turned)
        else:
            self._deciding = False

    def _on_turned(self) -> None:
        if self._pending_events:
            self._turn()
        else:
            self._deciding = False

    def _decide(self, event: Event) -> None:
        decision = decide(self.state, event, self._clock.now, self._policy)
        apply(self.state, decision.changes)
        self._idle_ticks.record(event, decision)
        self.outcome.decisions += 1
        for effect in decision.effects:
            self._carry_out(effect)
        self._wake_timer()

    def _carry_out(self, effect: Effect) -> None:
        agents, nodes = self.agents, self.nodes
        match effect:
            case SendStart(node=node, command=start):
                self._send(partial(agents.start, nodes[node], start, self._list_earlier_phases(effect)))
            case SendResume(node=node, command=resume):
                self._send(partial(agents.resume, nodes[node], resume, self._list_earlier_phases(effect)))
            case SendStop(node=node, command=stop):
                self._send(partial(agents.stop, nodes[node], stop))
            case SendSuspend(node=node, command=suspend):
                self._send(partial(agents.suspend, nodes[node], suspend))
            case SendPrefetch(node=node, command=prefetch):
                self._send(partial(agents.weights.prefetch, nodes[node], prefetch))
            case SendExpectation(node=node, command=expected):
                likelihood = {m.weights_id: m.likelihood * m.latency_sensitivity for m in expected.models}
                self._send(partial(agents.weights.expect, nodes[node], likelihood))
            case SendCancelPrefetch(node=node, command=cancelled):
                self._send(partial(agents.weights.cancel_prefetch, nodes[node], cancelled.weights_id))
            case OrderMigration(record=record):
                self._send(partial(self._migrator.start_migration, record))
            case PublishLoadFailed(event=failed):
                self._send(partial(self._gateway.fail_waiting, failed.model))
            case LoadEnded(plan=plan) if plan.outcome == "ready" and plan.chosen and plan.chosen.predicted_ms and plan.measured_ms:
                self.outcome.prediction_errors.append((plan.measured_ms - plan.chosen.predicted_ms) / 1e3)
            case _:
                pass

    def _send(self, job: Job) -> None:
        self._sent += 1
        self._clock.call_later(self._decision + self._delay, job)

    def _list_earlier_phases(self, effect: SendStart | SendResume) -> Spans:
        """Return the phases until the start was sent.

        services/scheduler/adapters/outbox.py records the same phases.
        """
        now, since = self._clock.now, effect.requested_at
        spans: Spans = ()
        if effect.planned_at - effect.requested_at > WAITED_S:
            spans, since = ((Phase.RESERVE, effect.requested_at, effect.planned_at),), effect.planned_at
        if effect.claimed:
            decided = min(now, effect.planned_at + self._decision)
            spans += ((Phase.SCHEDULE, since, decided), (Phase.RESERVE, decided, now))
            since = now
        return (*spans, (Phase.SCHEDULE, since, now + self._decision))

    def _wake_timer(self) -> None:
        """Schedule the next tick as services/scheduler/loop.py does, later while nothing waits."""
        now, state, policy = self._clock.now, self.state, self._policy
        busy = is_busy(state, now, policy, IDLE_TICK_S) or is_node_lost_soon(state, now, policy, IDLE_TICK_S)
        due = now + (TICK_S if busy else IDLE_TICK_S)
        if due < self._tick_at:
            self._next_tick.cancel()
            self._tick_at, self._next_tick = due, self._clock.at(due, self._tick)

    def _tick(self) -> None:
        self._tick_at = inf
        if self._idle_ticks.changes_nothing(self.state, self._clock.now):
            self.outcome.decisions += 1
            self._wake_timer()
        else:
            self._decide(Tick(self._clock.now))
