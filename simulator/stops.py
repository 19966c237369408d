"""Stop instances: for good, suspended, preempted, or after a migration."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.domain.policies.port import Clearance
from simulator.clock import Timer
from simulator.config import GB
from simulator.instances import Instance, Run, SimDevice
from simulator.migrations import Migrations
from simulator.options import Options
from simulator.starts import Starts
from simulator.world import World, can_have_snapshot


class Stops:
    def __init__(
        self, world: World, options: Options, starts: Starts, requeue: Callable[[list[Run]], None], freed: Callable[[], None]
    ) -> None:
        self._world, self._options, self._starts, self._requeue = world, options, starts, requeue
        self._freed = freed
        """Called when the memory of an instance has become free."""
        self.migrations: Migrations | None = None
        self._suspending: set[str] = set()
        """Instances that are suspended once their requests are finished."""

    def clear(self, device: SimDevice, clearance: Clearance) -> None:
        """Carry out the clearance of a plan.

        Reusable weights are dropped when the memory is taken.
        """
        for key in clearance.victims:
            instance = device.instances.get(key)
            if instance is None or instance.state != "ready":
                continue
            if clearance.how == "migrate" and key in clearance.moves and instance.runs:
                assert self.migrations is not None
                self.migrations.begin(instance, self._world.devices[clearance.moves[key]])
            elif clearance.how == "preempt" and instance.runs:
                self.preempt(instance)
            elif clearance.how == "suspend":
                self.suspend(instance)
            elif not instance.runs:
                self._give_way(instance)
            else:  # chosen as idle and serving by now: it stops after its requests
                self._close(instance)

    def _close(self, instance: Instance) -> None:
        instance.moving = True
        for part in instance.parts:
            self._world.touch(part.device)

    def on_emptied(self, instance: Instance) -> bool:
        """Handle the last finished request; return True if the instance stops for it."""
        if instance.key in self._suspending:
            self._suspending.discard(instance.key)
            self._snapshot(instance)
            return True
        if instance.moving and self.migrations is not None and not self.migrations.concerns(instance):
            self.leave(instance)
            return True
        return False

    def keep(self, instance: Instance) -> None:
        """Start the keep-alive of an idle instance, unless it has begun."""
        if instance.keep_timer is not None:
            return
        world, group = self._world, instance.model.group
        seconds = world.profile.keep(group.keep_alive, instance.load_s)
        if seconds < 0 or seconds == float("inf") or len(instance.model.instances) <= group.replicas_min:
            return

        def on_expired() -> None:
            instance.keep_timer = instance.leaves_at = None
            if instance.state != "ready" or instance.runs or instance.moving:
                return
            if len(instance.model.instances) > group.replicas_min:
                self._give_way(instance)
            else:
                for part in instance.parts:
                    world.touch(part.device)

        instance.keep_timer, instance.leaves_at = world.clock.call_later(seconds, on_expired), world.clock.now + seconds

    def _give_way(self, instance: Instance) -> None:
        """Suspend an idle instance if it can return sooner from that; otherwise stop it."""
        node, model = instance.parts[0].device.node, instance.model
        if self._world.is_suspended_when_evicted(instance):
            if model.snapshot > node.dram.free:
                self._options.displace_weights(node, model)
            self.suspend(instance)
        else:
            self.leave(instance)

    def leave(self, instance: Instance) -> None:
        """Stop an instance; its memory is free after `leave_s`."""
        self._out_of_service(instance)
        self._world.outcome.stops += 1
        seconds = self._world.runtime.startup.leave_s
        if seconds > 0:
            self._world.clock.call_later(seconds, lambda: self._on_gone(instance))
        else:
            self._on_gone(instance)

    def _out_of_service(self, instance: Instance) -> None:
        instance.state = "leaving"
        instance.model.instances.pop(instance.key, None)
        _cancel(instance.keep_timer)
        instance.keep_timer = None
        for part in instance.parts:
            self._world.touch(part.device)

    def _on_gone(self, instance: Instance, keep_weights: bool = True) -> None:
        if instance.state == "gone":
            return
        instance.state = "gone"
        world, model = self._world, instance.model
        self.count(instance)
        for part in instance.parts:
            device = part.device
            device.instances.pop(instance.key, None)
            device.booked -= part.nbytes
            if keep_weights and "reuse" in world.can and not world.runtime.exclusive and len(instance.parts) == 1:
                device.keep(model.name, min(model.weights, device.room), world.clock.now)
            world.touch(device)
        for part in instance.parts:
            self._starts.retry_waiting(part.device)
        self._freed()

    def preempt(self, instance: Instance) -> None:
        """Restart its requests elsewhere, from the prompt."""
        runs = list(instance.runs)
        for run in runs:
            instance.take(run)
            run.tokens = 0
        self._world.outcome.preemptions += len(runs)
        self.leave(instance)
        self._requeue(runs)

    def suspend(self, instance: Instance) -> None:
        """Suspend to host memory after its requests; stop it if there is no room."""
        if instance.runs:
            self._close(instance)
            self._suspending.add(instance.key)
        else:
            self._snapshot(instance)

    def _snapshot(self, instance: Instance) -> None:
        world, model, part = self._world, instance.model, instance.parts[0]
        node, name = part.device.node, f"snapshot:{instance.model.name}"
        if not can_have_snapshot(instance) or not node.dram.add(name, model.snapshot):
            self.leave(instance)
            return
        node.dram.pin(name)
        world.outcome.suspensions += 1
        self._out_of_service(instance)
        seconds = model.snapshot / min(link.bandwidth for link in part.device.path)

        def on_suspended() -> None:
            if instance.state != "gone":
                self._options.snapshots[node.name, model.name] = model.snapshot
                self._on_gone(instance, keep_weights=False)

        world.clock.call_later(seconds + world.runtime.startup.leave_s, on_suspended)

    def count(self, instance: Instance) -> None:
        """Add what the instance held until now to the outcome."""
        seconds = self._world.clock.now - instance.began
        self._world.outcome.device_seconds += seconds * len(instance.parts)
        self._world.outcome.device_memory_gb_seconds += seconds * instance.nbytes / GB

    def drop(self, instance: Instance) -> list[Run]:
        """Remove an instance of a failed node and return its requests."""
        runs = list(instance.runs)
        for run in runs:
            instance.take(run)
        self._suspending.discard(instance.key)
        if instance.state == "ready":
            self._out_of_service(instance)
        if instance.state == "leaving":
            self._on_gone(instance, keep_weights=False)
        return runs


def _cancel(timer: Timer | None) -> None:
    if timer is not None:
        timer.cancel()
