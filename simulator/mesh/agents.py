"""Simulate nodeagents and engines, which carry out the scheduler's commands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.domain.events import Event, LoaderStatusReceived, NodeStatusReceived, StartRefused, StopRefused
from shared.contracts.node import InstanceState, ResumeInstance, StartInstance, StopInstance, SuspendInstance
from shared.contracts.phases import Phase
from shared.errors import InstanceBusy, InsufficientMemory, NotFound, ThawError, Unavailable
from simulator.config import GB
from simulator.instances import Instance, Part, Run
from simulator.mesh.machine import MeshInstance, MeshNode
from simulator.mesh.weights import Weights
from simulator.world import World

Spans = tuple[tuple[Phase, float, float], ...]
LOADS_COALESCE_S = 0.1
"""Delay of changes that concern load only (services/nodeagent/adapters/publisher.py)."""


class Listener(Protocol):
    """The gateway's side, as agents call it."""

    def on_routed(self, instance: MeshInstance) -> None:
        """The instance accepts requests."""

    def on_unrouted(self, instance: MeshInstance) -> None:
        """The instance accepts no new requests."""

    def on_answered(self, run: Run) -> None:
        """A request has got its last token."""

    def requeue(self, runs: list[Run]) -> None:
        """Requests have lost their instance."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds of one start.

    Attributes:
        more: From ready to the first request's arrival, besides messages.
    """

    engine: float
    init: float
    warm_up: float
    more: float = 0.0


Recorded = Mapping[str, Sequence[StartTimes]]
"""By model, the durations of its starts in order."""


class Agents:
    """The nodeagents.

    Args:
        post: Sends an event to the scheduler.
        recorded: Overrides `usual`.
    """

    def __init__(
        self,
        world: World,
        nodes: dict[str, MeshNode],
        post: Callable[[Event], None],
        usual: StartTimes | None = None,
        recorded: Recorded | None = None,
    ) -> None:
        self._world, self._nodes, self._post = world, nodes, post
        s = world.runtime.startup
        self._usual = usual or StartTimes(s.container_s + s.context_s + s.libraries_s, s.init_s, s.warm_up_s)
        self._recorded = {name: deque(times) for name, times in (recorded or {}).items()}
        self._delay = world.runtime.message_ms / 1e3
        self._dirty: dict[str, None] = {}
        self._by_engine: dict[str, MeshInstance] = {}
        self.listener: Listener
        self.started: list[str] = []
        """Models, in the order of their starts and resumptions."""
        self.weights = Weights(world, self.report_loader)

    # Reports.

    def report(self, node: MeshNode) -> None:
        """Send the node's status at once."""
        self._dirty.pop(node.name, None)
        if node.alive:
            self._post(NodeStatusReceived(self._world.clock.now + self._delay, node.status(self._world.clock.now)))

    def report_loader(self, node: MeshNode) -> None:
        if node.alive:
            self._post(LoaderStatusReceived(self._world.clock.now + self._delay, node.loader_status()))

    def on_load_changed(self, instance: MeshInstance) -> None:
        """Report the load of an instance soon."""
        node = self._nodes[instance.node.name]
        if node.name not in self._dirty:
            self._dirty[node.name] = None
            self._world.clock.call_later(LOADS_COALESCE_S, lambda: self.report(node) if node.name in self._dirty else None)

    # Commands.

    def start(self, node: MeshNode, command: StartInstance, before: Spans = ()) -> None:
        """Start an instance.

        Args:
            node: Its node.
            command: The scheduler's command.
            before: Phases until the command was sent.
        """
        device = node.device(command.device_ids[0])
        if not node.alive:
            self._refuse_start(command.instance_id, Unavailable(f"No nodeagent answers on {node.name}", should_retry=True))
            return
        if not node.fits(device, command.reserve_bytes):
            self._refuse_start(command.instance_id, InsufficientMemory(f"{node.name} has no room for {command.card.name}"), node)
            return
        world, model = self._world, self._world.models[command.card.name]
        engine = Instance(
            command.instance_id, model, [Part(device, command.reserve_bytes)], world.clock, world.runtime, self._on_answered
        )
        # Nodes stop the instances of separate devices, whose weights stay there in any case.
        can_suspend = "suspend" in world.can and not node.residency
        instance = MeshInstance(command, engine, device, world.clock.now, can_suspend=can_suspend, phases=before)
        instance.resume_s = world.runtime.startup.restore_s + model.snapshot / min(link.bandwidth for link in device.path)
        device.instances[engine.key] = engine
        node.instances[instance.key] = instance
        self._by_engine[engine.key] = instance
        self.started.append(instance.model)
        self._load(node, instance)
        self.report(node)
        self.report_loader(node)

    def _refuse_start(self, key: str, error: ThawError, node: MeshNode | None = None) -> None:
        if node is not None:
            self.report(node)
        self._post(StartRefused(self._world.clock.now + self._delay, key, error.body()))

    def _load(self, node: MeshNode, instance: MeshInstance) -> None:
        """Load the weights over all links beside the engine's start; then initialise it.

        The engine warms up at the end.
        """
        clock, now = self._world.clock, self._world.clock.now
        recorded = self._recorded.get(instance.model)
        times = recorded.popleft() if recorded else self._usual
        early = self._world.runtime.startup.compute_while_loading
        outstanding = [3]

        def on_arrived(phase: Phase) -> None:
            if self._by_engine.get(instance.key) is not instance:
                return
            instance.phases += ((phase, now, clock.now),)
            if phase is Phase.CONTAINER and early:
                clock.call_later(times.init, lambda: on_initialised(clock.now - times.init))
                return
            outstanding[0] -= 1
            if not outstanding[0]:
                if early:
                    on_warmed_up(clock.now)
                else:
                    clock.call_later(times.init, lambda: on_initialised(clock.now - times.init))

        def on_initialised(began: float) -> None:
            if self._by_engine.get(instance.key) is not instance:
                return
            instance.phases += ((Phase.INIT, began, clock.now),)
            if early:
                self._accept_early(node, instance)
                outstanding[0] -= 1
                if not outstanding[0]:
                    on_warmed_up(clock.now)
                return
            clock.call_later(times.warm_up, lambda: on_warmed_up(clock.now - times.warm_up))

        def on_warmed_up(began: float) -> None:
            if clock.now > began:
                instance.phases += ((Phase.PROFILE, began, clock.now),)
            clock.call_later(times.more, lambda: self._on_started(node, instance))

        self.weights.load(node, instance, on_arrived)
        clock.call_later(times.engine, lambda: on_arrived(Phase.CONTAINER))

    def _accept_early(self, node: MeshNode, instance: MeshInstance) -> None:
        """Accept requests, whose results wait for the weights."""
        if instance.then == "stop":
            return
        instance.accepts_early = True
        instance.engine.withhold()
        self._open(node, instance)

    def _on_started(self, node: MeshNode, instance: MeshInstance) -> None:
        instance.engine.release()
        if self._by_engine.get(instance.key) is not instance or instance.then == "stop":
            return
        self._world.outcome.startup.append(self._world.clock.now - instance.began)
        self._on_ready(node, instance)
        if instance.command.park and instance.can_suspend:
            self._drain(node, instance, "suspend")

    def _on_ready(self, node: MeshNode, instance: MeshInstance) -> None:
        instance.state = InstanceState.READY
        if instance.accepts_early:
            self.report(node)
        else:
            self._open(node, instance)

    def _open(self, node: MeshNode, instance: MeshInstance) -> None:
        """Let the gateway send requests to the instance."""
        clock = self._world.clock
        instance.engine.state = "ready"
        instance.engine.ready_at = instance.engine.idle_since = clock.now
        self.report(node)
        clock.call_later(self._delay, lambda: self.listener.on_routed(instance) if instance.engine.state == "ready" else None)

    def stop(self, node: MeshNode, command: StopInstance) -> None:
        self._asked_to_leave(node, command, "stop")

    def suspend(self, node: MeshNode, command: SuspendInstance) -> None:
        self._asked_to_leave(node, command, "suspend")

    def _asked_to_leave(self, node: MeshNode, command: StopInstance | SuspendInstance, then: str) -> None:
        key, now = command.instance_id, self._world.clock.now
        instance = node.instances.get(key)
        if not node.alive or instance is None or instance.state in (InstanceState.DRAINING, InstanceState.STOPPED):
            return
        if command.only_if_idle and instance.engine.runs:
            self._post(StopRefused(now + self._delay, key, InstanceBusy("The instance is serving").body()))
            return
        if instance.state.parked:
            if then == "stop":
                self._on_gone(node, instance)
            return
        if instance.state is not InstanceState.READY:
            if not instance.engine.runs:  # those that have joined the load are answered first
                self.weights.end(instance)
            then = "stop"
        self._drain(node, instance, then if instance.can_suspend else "stop")
        if instance.engine.runs:
            instance.drains_until = now + command.drain_timeout_ms / 1e3
            self._world.clock.at(instance.drains_until, lambda: self._on_drain_timeout(node, instance))

    def _on_drain_timeout(self, node: MeshNode, instance: MeshInstance) -> None:
        """End the requests of an instance that still drains; they continue elsewhere.

        It is stopped then, also instead of being suspended. Of an instance that has been suspended
        and resumed since, this may be the time-out of an earlier draining.
        """
        if self._by_engine.get(instance.key) is not instance or instance.state is not InstanceState.DRAINING:
            return
        runs = list(instance.engine.runs)
        if not runs or self._world.clock.now < instance.drains_until:
            return
        instance.then = "stop"
        self.weights.end(instance)
        for run in runs:
            instance.engine.take(run)
            if self._world.runtime.failover == "restart":
                run.tokens = 0
        self._world.outcome.preemptions += len(runs)
        self._on_drained(node, instance)
        self.listener.requeue(runs)

    def _drain(self, node: MeshNode, instance: MeshInstance, then: str) -> None:
        self.listener.on_unrouted(instance)
        instance.state, instance.then = InstanceState.DRAINING, "suspend" if then == "suspend" else "stop"
        instance.engine.state = "leaving"
        self.report(node)
        if not instance.engine.runs:
            self._on_drained(node, instance)

    def _on_drained(self, node: MeshNode, instance: MeshInstance) -> None:
        """Suspend a drained instance to host memory if there is room, else stop it."""
        world, model, s = self._world, self._world.models[instance.model], self._world.runtime.startup
        if instance.then == "suspend" and self._reserve_snapshot(node, instance, model.snapshot):
            self.report_loader(node)
            seconds = s.leave_s + model.snapshot / min(link.bandwidth for link in instance.device.path)
            world.clock.call_later(seconds, lambda: self._on_suspended(node, instance))
            return
        world.outcome.stops += 1
        world.clock.call_later(s.leave_s, lambda: self._on_gone(node, instance))

    def _reserve_snapshot(self, node: MeshNode, instance: MeshInstance, nbytes: int) -> bool:
        """Reserve host memory for a snapshot; return False if there is too little.

        Cached weights are evicted for it, and then the least recently suspended instances are
        stopped (services/nodeagent/domain/suspending.py).
        """
        dram, name = node.sim.dram, f"snapshot:{instance.key}"
        parked = sorted((i for i in node.instances.values() if i.state.parked), key=lambda i: (i.suspended_at, i.key))
        if nbytes > dram.capacity - dram.pinned_bytes + sum(i.snapshot for i in parked):
            return False
        for oldest in parked:
            if nbytes <= dram.capacity - dram.pinned_bytes:
                break
            self._world.outcome.stops += 1
            self._on_gone(node, oldest)
        dram.add(name, nbytes)
        dram.pin(name)
        return True

    def _on_suspended(self, node: MeshNode, instance: MeshInstance) -> None:
        if self._by_engine.get(instance.key) is not instance:
            return
        self.count(instance)
        instance.state, instance.engine.state = InstanceState.SUSPENDED, "parked"
        instance.suspended_at = self._world.clock.now
        instance.snapshot = self._world.models[instance.model].snapshot
        node.snapshots += instance.snapshot
        self.weights.unpin(instance)
        self._world.outcome.suspensions += 1
        self.report(node)
        self.report_loader(node)

    def resume(self, node: MeshNode, command: ResumeInstance, before: Spans = ()) -> None:
        instance, world = node.instances.get(command.instance_id), self._world
        if not node.alive or instance is None or not instance.state.parked:
            missing = (
                Unavailable(f"No nodeagent answers on {node.name}")
                if not node.alive
                else NotFound("The instance is not suspended here")
            )
            self._refuse_start(command.instance_id, missing)
            return
        if not node.fits(instance.device, instance.command.reserve_bytes):
            self._refuse_start(command.instance_id, InsufficientMemory(f"{node.name} has no room for {instance.model}"), node)
            return
        instance.state, instance.then = InstanceState.RESUMING, ""
        instance.command = instance.command.model_copy(update={"plan_id": command.plan_id, "token": command.token})
        instance.began = began = world.clock.now
        self.started.append(instance.model)
        world.outcome.loads["snapshot"] = world.outcome.loads.get("snapshot", 0) + 1
        self.report(node)

        def restore_later() -> None:
            world.clock.call_later(world.runtime.startup.restore_s, on_restored)

        def on_restored() -> None:
            if self._by_engine.get(instance.key) is not instance or instance.state is not InstanceState.RESUMING:
                return
            self._drop_snapshot(node, instance)
            self.weights.hold(instance)
            instance.phases = (*before, (Phase.RESTORE, began, world.clock.now))
            instance.resume_s = world.clock.now - began
            world.outcome.startup.append(world.clock.now - began)
            self._on_ready(node, instance)
            self.report_loader(node)

        instance.flows.append(node.sim.network.start(instance.device.path, instance.snapshot, restore_later))

    # What becomes of requests and instances.

    def _on_answered(self, run: Run) -> None:
        assert run.instance is not None
        instance = self._by_engine[run.instance.key]
        instance.completed += 1
        self.listener.on_answered(run)
        self.on_emptied(instance)

    def on_emptied(self, instance: MeshInstance) -> None:
        """Handle an instance whose last request has left it."""
        self.on_load_changed(instance)
        if instance.state is InstanceState.DRAINING and not instance.engine.runs:
            self._on_drained(self._nodes[instance.node.name], instance)

    def _on_gone(self, node: MeshNode, instance: MeshInstance) -> None:
        if self._by_engine.pop(instance.key, None) is None:
            return
        if not instance.state.parked:
            self.count(instance)
        if instance.snapshot:
            self._drop_snapshot(node, instance)
        self.weights.release(node, instance)
        instance.state, instance.engine.state = InstanceState.STOPPED, "gone"
        instance.device.instances.pop(instance.key, None)
        self.report(node)
        del node.instances[instance.key]
        self.report_loader(node)

    def _drop_snapshot(self, node: MeshNode, instance: MeshInstance) -> None:
        node.sim.dram.unpin(f"snapshot:{instance.key}")
        node.sim.dram.remove(f"snapshot:{instance.key}")
        node.snapshots -= instance.snapshot
        instance.snapshot = 0

    def fail(self, node: MeshNode) -> list[Run]:
        """Fail a node: its memories are lost, its disk is not.

        Returns:
            The requests that the node served.
        """
        runs: list[Run] = []
        for instance in list(node.instances.values()):
            self.listener.on_unrouted(instance)
            self.weights.end(instance)
            for run in list(instance.engine.runs):
                instance.engine.take(run)
                runs.append(run)
            if not instance.state.parked:
                self.count(instance)
            self._by_engine.pop(instance.key, None)
            instance.state, instance.engine.state = InstanceState.STOPPED, "gone"
            instance.device.instances.pop(instance.key, None)
        self.weights.drop_prefetches(node)
        for flow in list(node.sim.network.flows):
            node.sim.network.cancel(flow)
        node.instances.clear()
        node.sim.dram.clear()
        for residency in node.residency.values():
            residency.clear()
        node.snapshots, node.sim.alive = 0, False
        return runs

    def recover(self, node: MeshNode) -> None:
        """Restart the node's nodeagent and loader."""
        node.sim.alive = True
        node.boot, node.seq = node.boot + 1, 0
        self.report(node)
        self.report_loader(node)

    def find(self, key: str) -> MeshInstance | None:
        return self._by_engine.get(key)

    def count(self, instance: MeshInstance) -> None:
        """Add what the instance held of its device until now."""
        seconds = self._world.clock.now - instance.began
        self._world.outcome.device_seconds += seconds
        self._world.outcome.device_memory_gb_seconds += seconds * instance.command.reserve_bytes / GB
