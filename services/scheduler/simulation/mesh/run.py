"""The simulation's loop: requests and nodes as events in order of time, every decision made by the scheduler's own `decide`.

Simplified against the mesh: one gateway; nodes report within a second of a change and before each decision about demand; nothing fails;
messages take a constant time and decisions none. A batching engine's speed is that of the moment when a request begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from math import inf

from services.scheduler.domain.decide import decide
from services.scheduler.domain.effects import Effect, LoadEnded, PublishLoadFailed, SendStart, SendStop
from services.scheduler.domain.entities import Device, Model, Node
from services.scheduler.domain.events import (
    DemandHeard,
    Event,
    LoaderStatusHeard,
    NodeStatusHeard,
    Recovered,
    StartRefused,
    StopRefused,
    Tick,
)
from services.scheduler.domain.policies.port import Profile
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.ranks import Dues
from services.scheduler.domain.state import ClusterState, Put, apply
from services.scheduler.simulation.config import GB, Batching, ClusterFile, Fixed, ModelGroup, names_of
from services.scheduler.simulation.mesh.machine import MeshInstance, MeshNode
from services.scheduler.simulation.report import Outcome, Served
from services.scheduler.simulation.workloads.request import Request
from shared.contracts.demand import Demand
from shared.contracts.models import ModelCard, ModelInfo, ModelSpec
from shared.contracts.node import InstanceState, StartInstance, StopInstance
from shared.errors import InstanceBusy, InsufficientMemory

TICK_S = 0.25
REPORT_S = 1.0
NOBODY_FALLS_SILENT = Policy(
    capabilities=frozenset({"preempt"}), node_lost_after=inf, demand_lost_after=inf, recovery_window=0.0, demand_settle=0.0
)
"""What these machines can do beside loading and evicting: interrupt. Nodes and gateways are heard of as long as there is something to say."""
Job = Callable[[], None]


def card_of(name: str, group: ModelGroup) -> ModelCard:
    spec = ModelSpec(
        name=name,
        source=f"/models/{name}",
        max_concurrency=group.capacity,
        keep_alive=group.keep_alive,
        memory=int((group.weights_gb + group.kv_gb) * GB),
        replicas={"min": 0, "max": group.replicas_max},
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


@dataclass
class _Queue:
    """A model's requests in the gateway, and its ready instances."""

    card: ModelCard
    group: ModelGroup
    waiting: deque[Request] = field(default_factory=deque)
    instances: dict[str, tuple[MeshNode, MeshInstance]] = field(default_factory=dict)
    told: int = 0


class Simulation:
    def __init__(
        self,
        cluster: ClusterFile,
        groups: Sequence[ModelGroup],
        profile: Profile = NOBODY_FALLS_SILENT.profile,
        starts: Sequence[float] | None = None,
    ) -> None:
        """`starts`: seconds that recorded starts took, in their order, in place of the cluster's own."""
        self.now = 0.0
        self.outcome = Outcome()
        self._policy, self._cluster = replace(NOBODY_FALLS_SILENT, profile=profile), cluster
        self.outcome.percentiles = {n: g.percentile for g in groups for n in names_of([g])}
        self._heap: list[tuple[float, int, Job]] = []
        self._numbers = 0
        self._delay = cluster.runtime.message_ms / 1e3
        self._ticking = self._reporting = False
        self._heard_at: dict[str, float] = {}
        self.state = ClusterState(epoch=1, recovered_at=-1e6)
        measured = iter(starts) if starts is not None else None
        self.nodes = {name: MeshNode(name, group, cluster.runtime.startup, measured) for name, group in cluster.each()}
        owners = [g for g in groups for _ in range(g.copies)]
        self._queues = {n: _Queue(card_of(n, g), g) for n, g in zip(names_of(list(groups)), owners, strict=True)}
        apply(self.state, [Put(Model(q.card)) for q in self._queues.values()])
        for node in self.nodes.values():
            apply(self.state, [Put(Node(node.name, "b", {}, tuple(Device(d, "cuda", "", node.budget) for d in node.devices)))])
        for position, queue in enumerate(self._queues.values()):
            nodes = list(self.nodes.values())
            for node in nodes[position % len(nodes) :] + nodes[: position % len(nodes)]:
                info = queue.card.info
                if node.ssd.used + info.weights_bytes <= node.ssd.capacity:
                    node.ssd.add(info.revision, info.weights_bytes)
        self._dirty = dict.fromkeys(self.nodes)

    def run(self, requests: Sequence[Request]) -> Outcome:
        self._decide(Recovered(0.0))
        for node in self.nodes.values():
            self._decide(LoaderStatusHeard(0.0, node.loader_status()))
        self._hear()
        for request in requests:
            self._at(request.at, partial(self._arrive, request))
        while self._heap:
            self.now, _, job = heappop(self._heap)
            job()
        for node in self.nodes.values():
            for instance in node.instances.values():
                self._count(instance)
        self.outcome.lost = len(requests) - len(self.outcome.served) - self.outcome.failed
        return self.outcome

    def _at(self, when: float, job: Job) -> None:
        self._numbers += 1
        heappush(self._heap, (when, self._numbers, job))

    # The gateway.

    def _arrive(self, request: Request) -> None:
        queue = self._queues[request.model]
        queue.waiting.append(request)
        self._dispatch(queue)

    def _dispatch(self, queue: _Queue) -> None:
        while queue.waiting:
            free = [(i.active, i.command.instance_id, n, i) for n, i in queue.instances.values() if i.open]
            if not free:
                break
            _, _, node, instance = min(free, key=lambda f: f[:2])
            self._serve(queue, node, instance, queue.waiting.popleft())
        self._tell(queue)

    def _tell(self, queue: _Queue) -> None:
        """Demand is a level: told when it changes, while something waits, and once when nothing does any more."""
        waiting = len(queue.waiting)
        if waiting == queue.told:
            return
        queue.told = waiting
        oldest = (self.now - queue.waiting[0].at) * 1e3 if waiting else 0.0
        flying = sum(i.active for _, i in queue.instances.values())
        demand = Demand(gateway="g", model=queue.card.name, waiting=waiting, in_flight=flying, oldest_wait_ms=int(oldest))
        self._at(self.now + self._delay, lambda: self._heard(demand))

    def _heard(self, demand: Demand) -> None:
        self._hear()
        self._decide(DemandHeard(self.now, demand, "w"))

    # Engines.

    def _serve(self, queue: _Queue, node: MeshNode, instance: MeshInstance, request: Request) -> None:
        service = queue.group.service
        if isinstance(service, Fixed):
            first, tpot = service.seconds, 0.0
            took = service.seconds
        else:
            tpot = _tpot(service, instance.active)
            first = request.prompt_tokens / service.prefill_tokens_per_second + tpot
            took = first + tpot * (request.output_tokens - 1)
        ttft = self.now + first - request.at
        instance.active += 1
        self.outcome.served.append(
            Served(request.model, request.at, self.now - request.at, ttft, tpot, ttft <= queue.group.slo_ttft)
        )
        self._changed(node)
        self._at(self.now + took, lambda: self._finished(queue, node, instance))

    def _finished(self, queue: _Queue, node: MeshNode, instance: MeshInstance) -> None:
        instance.active -= 1
        instance.completed += 1
        instance.idle_since = self.now
        self._changed(node)
        if instance.state is InstanceState.DRAINING and instance.active == 0:
            self._leave(node, instance)
        self._dispatch(queue)

    # Nodes.

    def _changed(self, node: MeshNode) -> None:
        """There is something to report: within a second, as nodes do."""
        self._dirty[node.name] = None
        if not self._reporting:
            self._reporting = True
            self._at(self.now + REPORT_S, self._report)

    def _report(self) -> None:
        self._reporting = False
        self._hear()

    def _start(self, node: MeshNode, command: StartInstance) -> None:
        if not node.fits(command):
            error = InsufficientMemory(f"{node.name} has no room for {command.card.name}").body()
            self._later(StartRefused(self.now + self._delay, command.instance_id, error))
            return
        queue = self._queues[command.card.name]
        instance = node.start(command, self.now, queue.group.capacity)
        self.outcome.loads[instance.tier] = self.outcome.loads.get(instance.tier, 0) + 1
        self._changed(node)
        self._later(LoaderStatusHeard(self.now + self._delay, node.loader_status()))
        self._at(instance.ready_at, lambda: self._ready(queue, node, instance))

    def _ready(self, queue: _Queue, node: MeshNode, instance: MeshInstance) -> None:
        if instance.state is not InstanceState.LOADING:
            return
        instance.state, instance.idle_since = InstanceState.READY, self.now
        queue.instances[instance.command.instance_id] = (node, instance)
        self.outcome.startup.append(instance.ready_at - instance.began)
        self._later(NodeStatusHeard(self.now + self._delay, node.status(self.now)))
        self._dispatch(queue)

    def _stop(self, node: MeshNode, command: StopInstance) -> None:
        instance = node.instances.get(command.instance_id)
        if instance is None or instance.state in (InstanceState.DRAINING, InstanceState.STOPPED):
            return
        if command.only_if_idle and instance.active:
            self._later(StopRefused(self.now + self._delay, command.instance_id, InstanceBusy("it is serving").body()))
            return
        self._queues[instance.model].instances.pop(command.instance_id, None)
        instance.state = InstanceState.DRAINING
        self.outcome.stops += 1
        self._later(NodeStatusHeard(self.now + self._delay, node.status(self.now)))
        if instance.active == 0:
            self._leave(node, instance)

    def _leave(self, node: MeshNode, instance: MeshInstance) -> None:
        self._at(self.now + self._cluster.runtime.startup.leave_s, lambda: self._gone(node, instance))

    def _gone(self, node: MeshNode, instance: MeshInstance) -> None:
        self._count(instance)
        instance.state = InstanceState.STOPPED
        self._later(NodeStatusHeard(self.now + self._delay, node.status(self.now)))
        node.gone(instance)

    def _count(self, instance: MeshInstance) -> None:
        seconds = self.now - instance.began
        self.outcome.device_seconds += seconds * len(instance.command.device_ids)
        self.outcome.device_memory_gb_seconds += seconds * instance.command.reserve_bytes / GB

    # The scheduler.

    def _later(self, event: Event) -> None:
        self._at(self.now + self._delay, lambda: self._decide(event))

    def _hear(self) -> None:
        """What nodes have to report by now."""
        for name in list(self._dirty):
            self._heard_at[name] = self.now
            self._decide(NodeStatusHeard(self.now, self.nodes[name].status(self.now)))
        self._dirty.clear()

    def _decide(self, event: Event) -> None:
        decision = decide(self.state, event, self.now, self._policy)
        apply(self.state, decision.changes)
        self.outcome.decisions += 1
        for effect in decision.effects:
            self._carry_out(effect)
        self._wake_timer()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendStart(node=node, command=start):
                self._at(self.now + self._delay, lambda: self._start(self.nodes[node], start))
            case SendStop(node=node, command=stop):
                self._at(self.now + self._delay, lambda: self._stop(self.nodes[node], stop))
            case PublishLoadFailed(event=failed):
                queue = self._queues[failed.model]
                self.outcome.failed += len(queue.waiting)
                queue.waiting.clear()
                self._tell(queue)
            case LoadEnded(plan=plan) if plan.outcome == "ready" and plan.chosen and plan.chosen.predicted_ms and plan.measured_ms:
                self.outcome.prediction_errors.append((plan.measured_ms - plan.chosen.predicted_ms) / 1e3)
            case _:
                pass

    def _wake_timer(self) -> None:
        """The scheduler's timer, left out while nothing depends on the time."""
        if self._ticking:
            return
        state, dues = self.state, self.state.dues
        first = dues.order[0][0] if isinstance(dues, Dues) and dues.order else inf
        if state.unmet or state.claimed or state.pauses or state.pressure:
            first = self.now
        if first < inf:
            self._ticking = True
            self._at(max(self.now + TICK_S, first), self._tick)

    def _tick(self) -> None:
        self._ticking = False
        for name in self.nodes:  # as long as something is open, nodes are heard of as often as real ones
            if self.now - self._heard_at.get(name, 0.0) >= REPORT_S:
                self._dirty[name] = None
        if self._heap or self.state.claimed or self.state.unmet:
            self._hear()
            self._decide(Tick(self.now))


def _tpot(service: Batching, beside: int) -> float:
    return (service.tpot_ms + service.tpot_ms_more * beside) / 1e3
