"""Consolidate pipelines (HydraServe §6): stages load the rest and continue alone.

The number of whole instances, and each one's share of the requests, are the live scheduler's
(`policies/autoscaling.py`). When all of them have the rest of the weights, the running requests' KV
cache is gathered. A gathering has the links of its nodes to itself (the artifact's scheduler.py:
`try_claim_full_net`): others wait, and their pipelines serve meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from services.scheduler.domain.policies.autoscaling import needed_workers, share_requests
from services.scheduler.domain.policies.port import Ask, Clearance
from simulator.instances import Instance, Part, Run
from simulator.options import Options
from simulator.starts import Starts
from simulator.stops import Stops
from simulator.world import World

RETRY_S = 0.1
"""Interval at which a pipeline with more requests than its successors take looks again."""


class Pipelines:
    def __init__(
        self,
        world: World,
        starts: Starts,
        options: Options,
        stops: Stops,
        in_service: Callable[[Instance], None],
        idle: Callable[[Instance], None],
        grant: Callable[[Instance, Run], bool],
        requeue: Callable[[list[Run]], None],
    ) -> None:
        self._world, self._starts, self._options, self._stops = world, starts, options, stops
        self._in_service, self._idle, self._grant, self._requeue = in_service, idle, grant, requeue
        self._gathering: set[str] = set()
        """Nodes that gather a KV cache."""
        self._queued: list[tuple[Instance, list[Part]]] = []
        """Pipelines and successors that wait for these nodes, in order."""
        self._retrying = False

    def consolidate(self, instance: Instance) -> None:
        """Consolidate a pipeline: one stage stays.

        Under load several stages become whole instances.
        """
        world, model = self._world, instance.model
        able = [p for p in instance.parts if self._can_grow(instance, p)]
        if not able:
            # No stage has room for the rest yet. Nothing is evicted for an idle pipeline.
            if instance.runs:
                self._make_room(instance)
            world.clock.call_later(1.0, lambda: self._consolidate_again(instance))
            return
        survivors = able[: self._count_successors(instance)]
        instance.successors = len(survivors)
        for part in survivors:
            grown = model.need - part.nbytes
            part.device.booked += grown
            part.nbytes += grown
            world.touch(part.device)
        left = {id(p): p for p in survivors}
        for part in survivors:
            self._fetch_rest(instance, part, lambda p=part: self._on_whole(instance, p, left))  # type: ignore[misc]

    def _count_successors(self, instance: Instance) -> int:
        """Return how many of its stages the load needs as whole instances.

        Other pipelines count as what they become, and as nothing until that is decided.
        """
        world, model = self._world, instance.model
        demand = world.demand_of(model)
        whole = sum(i.successors if len(i.parts) > 1 else 1 for i in model.instances.values() if i is not instance and not i.moving)
        target = max(world.profile.scale(replace(demand, live=whole + 1)), min(needed_workers(demand), demand.max_replicas))
        return max(1, min(len(instance.parts), target - whole))

    def _consolidate_again(self, instance: Instance) -> None:
        if instance.state == "ready" and len(instance.parts) > 1:
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

    def _fetch_rest(self, instance: Instance, part: Part, done: Callable[[], None]) -> None:
        """Load what the stage lacks, after all loads that requests wait for.

        Stages of one node that lack the same share one fetch.
        """
        node, model, stages = part.device.node, instance.model, len(instance.parts)
        stage = instance.parts.index(part)
        nbytes = model.weights - model.stage_weights(stages)[stage]
        outstanding = 1
        node.record_use(model.name)

        def on_arrived() -> None:
            nonlocal outstanding
            outstanding -= 1
            if not outstanding:
                done()

        if path := node.source(node.tier(model.name)):
            outstanding += 1
            self._world.fetches.join(node, (node.name, model.name, ~stage, stages), path, nbytes, on_arrived, background=True)
        node.network.start(part.device.path, nbytes, on_arrived, background=True)

    def _on_whole(self, instance: Instance, part: Part, left: dict[int, Part]) -> None:
        """Split the pipeline once all its successors have the whole model."""
        if instance.state != "ready" or part not in instance.parts:
            return
        del left[id(part)]
        instance.done.append(part)
        if not left:  # until then the pipeline serves on
            survivors, instance.done = instance.done, []
            instance.capacity = instance.capacity_of(len(survivors))
            self._queued.append((instance, survivors))
            self._gather_next()

    def _gather_next(self) -> None:
        """Split the pipelines whose nodes gather nothing."""
        waiting, self._queued = self._queued, []
        taken: set[str] = set()
        for instance, survivors in waiting:
            if instance.state != "ready" or len(instance.parts) == 1:
                continue
            nodes = {p.device.node.name for p in instance.parts}
            if nodes & (self._gathering | taken):
                taken |= nodes  # in order: a later one does not overtake on them
                self._queued.append((instance, survivors))
            elif len(instance.runs) > instance.capacity:
                self._queued.append((instance, survivors))
                self._retry()
            else:
                self._split(instance, survivors, nodes)

    def _retry(self) -> None:
        """Look again soon: requests of a pipeline may have ended."""

        def on_time() -> None:
            self._retrying = False
            self._gather_next()

        if not self._retrying:
            self._retrying = True
            self._world.clock.call_later(RETRY_S, on_time)

    def _split(self, instance: Instance, survivors: list[Part], nodes: set[str]) -> None:
        """Split the pipeline into instances, with a share of the requests each."""
        world = self._world
        shares = self._divide(instance, len(survivors))
        world.outcome.successors.append(len(survivors))
        gathered = max(self._gather_seconds(instance, runs) for runs in shares)
        stays, others = survivors[0], survivors[1:]
        released = [p for p in instance.parts if p not in survivors]
        now = world.clock.now
        held = (now - instance.began) / 1e9
        world.outcome.device_memory_gb_seconds += held * sum(p.nbytes for p in instance.parts if p is not stays)
        world.outcome.device_seconds += (now - instance.began) * (len(instance.parts) - 1)
        kv_tokens = {run: instance.kv_tokens_of(run) for runs in shares[1:] for run in runs}
        for run in kv_tokens:
            instance.take(run)
        instance.become([stays], gathered)
        for p in (*released, *others):
            p.device.instances.pop(instance.key, None)
            p.device.booked -= p.nbytes
            world.touch(p.device)
        replicas = [self._replica(instance, p) for p in others]
        if gathered > 0:
            self._gathering |= nodes
            world.clock.call_later(gathered, lambda: self._on_gathered(nodes))
        homeless: list[Run] = []
        for new, runs in zip(replicas, shares[1:], strict=True):
            homeless += self._hand_over(new, runs, kv_tokens, gathered)
        for new in replicas:  # after all of them count, so that no further instance is started
            self._in_service(new)
        for p in released:
            self._starts.retry_waiting(p.device)
        for p in survivors:
            world.touch(p.device)
        if not instance.runs:
            self._idle(instance)
        if homeless:
            self._requeue(homeless)

    def _divide(self, instance: Instance, workers: int) -> list[list[Run]]:
        """Return the requests of each successor, as the live scheduler divides them."""
        left, shares = list(instance.runs), list[list[Run]]()
        for worker in range(workers, 0, -1):
            served = len(instance.runs) - len(left)
            count = share_requests(len(left), served, workers, 0) if worker > 1 else len(left)
            shares.append(left[:count])
            left = left[count:]
        return shares

    def _hand_over(self, new: Instance, runs: list[Run], kv_tokens: Mapping[Run, int], gathered: float) -> list[Run]:
        """Continue requests on a successor once their KV cache is gathered.

        Args:
            new: The successor.
            runs: The requests.
            kv_tokens: Tokens of each whose KV cache the stages had.
            gathered: Seconds of the gathering.

        Returns:
            Requests for whose KV cache it has no memory.
        """
        new.hold(gathered)
        homeless = []
        for run in runs:
            if not self._grant(new, run):
                homeless.append(run)
                continue
            run.prepared = kv_tokens[run]
            new.admit(run)
        return homeless

    def _on_gathered(self, nodes: set[str]) -> None:
        self._gathering -= nodes
        self._gather_next()

    def _replica(self, instance: Instance, part: Part) -> Instance:
        world = self._world
        world.plans += 1
        new = Instance(f"i{world.plans}", instance.model, [part], world.clock, world.runtime, instance.finished)
        part.device.instances[new.key] = new
        part.device.booked += part.nbytes
        new.state, new.load_s, new.source = "ready", instance.load_s, "pipeline"
        new.ready_at = instance.ready_at  # its requests have waited for no other start
        instance.model.instances[new.key] = new
        return new

    def _gather_seconds(self, instance: Instance, runs: list[Run]) -> float:
        """Return the seconds to gather these requests' KV caches over the network of one node."""
        tokens = sum(instance.kv_tokens_of(r) for r in runs)
        share = (len(instance.parts) - 1) / len(instance.parts)
        return tokens * instance.model.kv_per_token * share / (self._world.runtime.gather_gb_per_second * 1e9)
