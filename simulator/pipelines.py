"""Consolidate pipelines (HydraServe §6): stages load the rest and continue alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from services.scheduler.domain.policies.port import Ask, Clearance
from simulator.instances import Instance, Part
from simulator.options import Options
from simulator.starts import Starts
from simulator.stops import Stops
from simulator.world import World


class Pipelines:
    def __init__(
        self, world: World, starts: Starts, options: Options, stops: Stops, in_service: Callable[[Instance], None]
    ) -> None:
        self._world, self._starts, self._options, self._stops = world, starts, options, stops
        self._in_service = in_service

    def consolidate(self, instance: Instance) -> None:
        """Consolidate a pipeline: one stage stays.

        With more wanted instances, several stages become whole ones.
        """
        world, model = self._world, instance.model
        demand = world.demand_of(model)
        others = demand.live - len(instance.parts)
        wanted = max(1, min(len(instance.parts), world.profile.scale(replace(demand, live=others + 1)) - others))
        able = [p for p in instance.parts if self._can_grow(instance, p)]
        if not able:
            # No stage has room for the rest yet: retry later, as long as the pipeline serves.
            self._make_room(instance)
            world.clock.call_later(1.0, lambda: self._consolidate_again(instance))
            return
        rest = model.weights * (len(instance.parts) - 1) / len(instance.parts)
        survivors = able[:wanted]
        for part in survivors:
            grown = model.need - part.nbytes
            part.device.booked += grown
            part.nbytes += grown
            world.touch(part.device)
        left = {id(p): p for p in survivors}
        for part in survivors:
            self._fetch_rest(instance, part, rest, lambda p=part: self._split(instance, p, left))  # type: ignore[misc]

    def _consolidate_again(self, instance: Instance) -> None:
        if instance.state == "ready" and len(instance.parts) > 1 and instance.runs:
            self.consolidate(instance)

    def _make_room(self, instance: Instance) -> None:
        """Evict idle instances for the rest of the model, where the policy prefers that."""
        world, model = self._world, instance.model
        found: list[tuple[float, int, Clearance]] = []
        for n, part in enumerate(instance.parts):
            short = model.need - part.nbytes - world.free(part.device)
            view = world.view(part.device)
            leaving_bytes = sum(r.nbytes for r in view.residents if r.state == "leaving")
            if short <= leaving_bytes:
                return
            clearance = world.profile.clear(Ask(model.name, model.need, 0.0), view, short - leaving_bytes, world.clock.now)
            if clearance is not None and clearance.how == "evict":
                found.append((clearance.penalty_s, n, clearance))
        if found:
            _, n, clearance = min(found, key=lambda f: f[:2])
            self._stops.clear(instance.parts[n].device, clearance)

    def _can_grow(self, instance: Instance, part: Part) -> bool:
        return self._world.free(part.device) >= instance.model.need - part.nbytes

    def _fetch_rest(self, instance: Instance, part: Part, nbytes: float, done: Callable[[], None]) -> None:
        node = part.device.node
        path = (*node.source(node.tier(instance.model.name)), *part.device.path)
        node.network.start(path, nbytes, done, background=True)

    def _split(self, instance: Instance, part: Part, left: dict[int, Part]) -> None:
        """Split the pipeline into instances; the first survivor takes the requests."""
        world = self._world
        if instance.state not in ("ready", "leaving") or part not in instance.parts:
            return
        del left[id(part)]
        if left:  # others still load: the pipeline serves on
            instance.done.append(part)
            return
        survivors = [*instance.done, part]
        instance.done = []
        gathered = self._gather_seconds(instance)
        stays, others = survivors[0], survivors[1:]
        released = [p for p in instance.parts if p not in survivors]
        now = world.clock.now
        held = (now - instance.began) / 1e9
        world.outcome.device_memory_gb_seconds += held * sum(p.nbytes for p in instance.parts if p is not stays)
        world.outcome.device_seconds += (now - instance.began) * (len(instance.parts) - 1)
        instance.become([stays], gathered)
        for p in (*released, *others):
            p.device.instances.pop(instance.key, None)
            p.device.booked -= p.nbytes
            world.touch(p.device)
        replicas = [self._replica(instance, p) for p in others]
        for new in replicas:  # after all of them count, so that no further instance is started
            self._in_service(new)
        for p in released:
            self._starts.room(p.device)
        for p in survivors:
            world.touch(p.device)
        if not instance.runs and instance.state == "ready":
            self._in_service(instance)

    def _replica(self, instance: Instance, part: Part) -> Instance:
        world = self._world
        world.plans += 1
        new = Instance(f"i{world.plans}", instance.model, [part], world.clock, world.runtime, instance.finished)
        part.device.instances[new.key] = new
        part.device.booked += part.nbytes
        new.state, new.ready_at, new.load_s, new.source = "ready", world.clock.now, instance.load_s, "pipeline"
        instance.model.instances[new.key] = new
        return new

    def _gather_seconds(self, instance: Instance) -> float:
        """Return the seconds to gather the running requests' KV blocks over the network."""
        tokens = sum(r.prompt + instance.tokens_of(r) for r in instance.runs)
        share = (len(instance.parts) - 1) / len(instance.parts)
        return tokens * instance.model.kv_per_token * share / (self._world.runtime.gather_gb_per_second * 1e9)
