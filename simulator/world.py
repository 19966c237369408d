"""The simulated state, and the policy's views of it.

Views are cached until a device changes, time passes, or a request arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from services.scheduler.domain.cost.formulas import request_rate, reuse_odds
from services.scheduler.domain.policies.port import Ask, Capability, Demand, DeviceView, MigrationTarget, Profile, Resident, Usage
from simulator.clock import Clock
from simulator.config import ClusterFile, ModelGroup, names_of
from simulator.instances import Instance, SimDevice, SimModel, SimNode
from simulator.report import Outcome
from simulator.shared_fetches import Fetches

HORIZON_S = 60.0
"""The horizon of the live scheduler (`Policy.horizon_s`)."""


class World:
    """The state of a simulation.

    Attributes:
        version: Counts changes of devices. A model without a place is not tried again before it
            changes.
    """

    def __init__(self, cluster: ClusterFile, groups: Sequence[ModelGroup], profile: Profile, seed: int) -> None:
        self.clock, self.profile, self.seed = Clock(), profile, seed
        self.cluster, self.runtime = cluster, cluster.runtime
        self.can: frozenset[Capability] = cluster.runtime.capabilities & profile.uses
        # A device that runs one request at a time is offered when it is idle: nothing there can be
        # preempted.
        self.interrupts = not self.runtime.exclusive and not self.can.isdisjoint(("migrate", "preempt", "suspend"))
        self.outcome = Outcome()
        self.version = 0
        self.asking = 0
        """Priority of the model that is being placed."""
        self.fetches = Fetches()
        self._roomy: dict[int, list[SimDevice]] = {}
        self._roomy_version = -1
        self.plans = 0
        self.arrived = 0
        self.nodes = {name: SimNode(name, group, self.clock) for name, group in cluster.iter_nodes()}
        self.devices = {d.key: d for node in self.nodes.values() for d in node.devices}
        nodes = tuple(self.nodes.values())
        owners = [g for g in groups for _ in range(g.copies)]
        self.models: dict[str, SimModel] = {}
        for number, (name, group) in enumerate(zip(names_of(list(groups)), owners, strict=True)):
            homes = (nodes[number % len(nodes)],) if self.runtime.homes else nodes
            allowed = tuple(n for n in homes if not group.kinds or n.group.kind in group.kinds)
            self.models[name] = SimModel(name, number, group, allowed)
        self.outcome.percentiles = {n: m.group.percentile for n, m in self.models.items()}
        self.book: dict[str, Usage] = {
            n: Usage(n, percentile=m.group.percentile) for n, m in self.models.items() if m.group.has_ttft_objective
        }
        self._fill()

    def _fill(self) -> None:
        """Fill disks with models, round robin over nodes, popular ones first.

        With the runtime's `in_dram` the memories are filled, too.
        """
        passes = max(len(m.nodes) for m in self.models.values()) if self.runtime.ssd_copies == "full" else 1
        for round_ in range(passes):
            for model in self.models.values():
                turn = (model.number + round_) % len(model.nodes) if model.nodes else 0
                for node in model.nodes[turn:] + model.nodes[:turn]:
                    if model.name not in node.ssd and node.ssd.used + model.weights <= node.ssd.capacity:
                        node.ssd.add(model.name, model.weights)
                        break
        for model in self.models.values() if self.runtime.in_dram else ():
            for node in model.nodes:
                if node.dram.used + model.weights <= node.dram.capacity:
                    node.dram.add(model.name, model.weights)
        self.order_caches()

    def order_caches(self) -> None:
        """Make the more popular models the more recently used ones on disks and in memories."""
        for node in self.nodes.values():
            for name in reversed(self.models):
                node.ssd.touch(name)
                node.dram.touch(name)

    def touch(self, device: SimDevice) -> None:
        """Count a change of a device."""
        self.version += 1
        device.version += 1

    def touch_node(self, node: SimNode) -> None:
        for device in node.devices:
            self.touch(device)

    def free(self, device: SimDevice) -> int:
        """Return the free and unpromised bytes; negative while victims are still there."""
        return device.budget - device.booked - device.kept_bytes - device.promised

    def view(self, device: SimDevice) -> DeviceView:
        """Return the policy's view.

        It contains progress and the popularity of models, and is valid for one moment.
        """
        made = (device.version, self.clock.now, self.asking, self.arrived)
        if device.view is None or device.view_of != made:
            device.view, device.view_of = self._view(device), made
        return device.view

    def _view(self, device: SimDevice) -> DeviceView:
        free = self.free(device)
        residents = [self._describe_resident(device, i) for i in device.instances.values()]
        coming = sum(r.nbytes for r in residents if r.state == "leaving")
        residents += [self._describe_kept(device, k) for k in device.kept]
        loads = [heavy for d in device.neighbours for heavy in d.loading.values()]
        starting = self.runtime.exclusive and bool(device.starting)
        return DeviceView(
            device.key,
            device.node.name,
            device.budget,
            max(0, free),
            max(0, free + coming),
            tuple(residents),
            device.busy + starting,
            "none" if not loads else "heavy" if any(loads) else "light",
        )

    def _describe_resident(self, device: SimDevice, instance: Instance) -> Resident:
        model, runs = instance.model, instance.runs
        parts = instance.parts
        nbytes = parts[0].nbytes if len(parts) == 1 else sum(p.nbytes for p in parts if p.device is device)
        state = instance.state
        serving = state == "ready" and bool(runs or instance.moving)
        resume: float | None = None
        moves: tuple[MigrationTarget, ...] = ()
        left = 0.0
        if serving and self.interrupts:
            left, tokens = instance.progress()
            if not instance.moving and len(instance.parts) == 1:
                resume = model.resume_seconds(tokens)
                moves = self._moves(device, instance, tokens)
        return Resident(
            instance.key,
            model.name,
            nbytes,
            "leaving" if state == "leaving" else "starting" if state == "starting" else "serving" if serving else "idle",
            last_used=max(instance.idle_since, instance.ready_at),
            ready_at=instance.ready_at,
            active=len(runs),
            queued=len(model.queue),
            priority=model.group.priority,
            is_heavy=model.group.heavy,
            sensitivity=model.group.sensitivity,
            miss_probability=self.popularity(model),
            reuse_probability=self._estimate_reuse(model, instance.leaves_at),
            reload_s=(reload := self.reload_seconds(device, model, model.weights)),
            delay_s=self._later_seconds(device, instance, reload),
            requests_per_s=request_rate(model.total, self.clock.now, self.clock.now - model.last_asked),
            resume_s=resume,
            moves=moves,
            remaining_s=left,
            replicas=len(model.instances),
            protected_reason=self._explain_protected(instance, moves),
        )

    def _explain_protected(self, instance: Instance, moves: tuple[MigrationTarget, ...]) -> str:
        """Return why an instance must not be a victim; empty: it may.

        A serving instance is preempted only for a higher priority, or if its requests can continue
        elsewhere:
        two models that preempt each other forever serve nothing. Suspension waits for its requests.
        """
        interrupted = "suspend" not in self.can or "preempt" in self.can
        if instance.runs and not moves and interrupted and instance.model.group.priority >= self.asking:
            return "serves, and has no migration target"
        if instance.moving:
            return "its requests are being moved"
        if instance.state in ("starting", "leaving"):
            return instance.state
        if len(instance.parts) > 1 and instance.runs:
            return "a stage of a pipeline that serves"
        if instance.state == "ready" and len(instance.model.instances) <= instance.model.group.replicas_min:
            return "min replicas"
        return ""

    def _describe_kept(self, device: SimDevice, name: str) -> Resident:
        kept, model = device.kept[name], self.models[name]
        wanted = any(i.model is model and i.state == "starting" for i in device.instances.values())
        return Resident(
            f"weights:{name}",
            name,
            kept.nbytes,
            "weights",
            last_used=kept.last_used,
            sensitivity=model.group.sensitivity,
            is_heavy=model.group.heavy,
            miss_probability=self.popularity(model),
            reuse_probability=self._estimate_reuse(model),
            reload_s=self.reload_seconds(device, model, kept.nbytes),
            replicas=len(model.instances) + 1,
            protected_reason="wanted" if wanted else "",
        )

    def _moves(self, device: SimDevice, instance: Instance, tokens: int) -> tuple[MigrationTarget, ...]:
        """Return the devices with room for the instance's model.

        Each has the seconds to migrate there.
        """
        model = instance.model
        found = [
            MigrationTarget(
                i.parts[0].device.key, model.resume_seconds(tokens, i.service), model.need + max(0, self.free(i.parts[0].device))
            )
            for i in model.instances.values()
            if i is not instance and i.open and len(i.runs) + len(instance.runs) <= i.capacity
        ]
        for other in self.list_roomy(model.need):
            if other is not device and other.node in model.nodes and not any(i.model is model for i in other.instances.values()):
                resume = model.resume_seconds(tokens, model.service_on(other.node.group.kind))
                seconds = resume + self.start_seconds(other, model, model.weights)
                found.append(MigrationTarget(other.key, seconds, self.free(other)))
        return tuple(found)

    def list_roomy(self, need: int) -> list[SimDevice]:
        """Return the devices with that many free bytes."""
        if self._roomy_version != self.version:
            self._roomy_version = self.version
            self._roomy.clear()
        found = self._roomy.get(need)
        if found is None:
            found = self._roomy[need] = [d for d in self.devices.values() if d.node.alive and self.free(d) >= need]
        return found

    def popularity(self, model: SimModel) -> float:
        """Return the model's share of the requests so far; equal shares before the first."""
        return model.total / self.arrived if self.arrived else 1.0 / len(self.models)

    def _estimate_reuse(self, model: SimModel, leaves_at: float | None = None) -> float:
        """Return the probability of a request soon.

        Soon is within `HORIZON_S`, or before the instance would stop by itself. The live
        scheduler's prefetching uses the same rule.
        """
        now = self.clock.now
        horizon = HORIZON_S if leaves_at is None else min(HORIZON_S, max(0.0, leaves_at - now))
        if not model.total or horizon <= 0:
            return 0.0
        unused = now - model.last_asked
        every = max(now / model.total, unused / 2, 1e-3)
        return min(reuse_odds(unused, horizon), 1 - exp(-horizon / every))

    def reload_seconds(self, device: SimDevice, model: SimModel, nbytes: int) -> float:
        """Return the seconds over the slowest link, without queueing."""
        node = device.node
        links = (*node.source(node.tier(model.name)), *device.path)
        return nbytes / min(link.bandwidth for link in links)

    def _later_seconds(self, device: SimDevice, instance: Instance, reload: float) -> float:
        """Return the seconds by which eviction delays the model's next request.

        They are those of a new start, of a restore where the instance would be suspended, or of a
        load during which the request executes.
        """
        model = instance.model
        if not self.runtime.exclusive:
            if not instance.runs and self.is_suspended_when_evicted(instance):
                return self._restore_seconds(device.node, model)
            return self._least_start_seconds(device.node, model)
        return max(0.0, reload - model.exec_seconds(0, model.mean_output)) if self.runtime.late_execution else reload

    def _least_start_seconds(self, node: SimNode, model: SimModel) -> float:
        """Return the seconds of a start over links that nothing else uses."""
        source = node.source(node.tier(model.name))
        fetch = model.weights / min(link.bandwidth for link in source) if source else 0.0
        return self.startup_seconds(fetch, model.weights / min(link.bandwidth for link in node.devices[0].path))

    def start_seconds(self, device: SimDevice, model: SimModel, nbytes: int) -> float:
        """Return the seconds until a start is ready, with queueing on its links (q + n/b)."""
        return self.startup_seconds(*self.transfer_seconds(device, model, nbytes))

    def transfer_seconds(self, device: SimDevice, model: SimModel, nbytes: int) -> tuple[float, float]:
        """Return the seconds to the node's memory, and on to the device, with queueing."""
        node = device.node
        fetch = self.fetches.estimate_seconds(node, model.name, node.source(node.tier(model.name)), nbytes)
        return fetch, node.network.estimate_seconds(device.path, nbytes)

    def shares_fetch(self, node: SimNode, model: SimModel) -> bool:
        """True if a load of the weights that one device lacks shares its fetch with other loads.

        Thaw's loader gives it a load of its own, unless the node loads all of the weights. A disk
        that caches a remote source is filled once for all loads (weights/cache/caching.py).
        """
        is_cached = self.runtime.cache_ssd and model.weights <= node.ssd.capacity
        return self.fetches.under_way((node.name, model.name, 0, 1)) or (node.tier(model.name) == "remote" and is_cached)

    def startup_seconds(self, fetch: float, load: float, clear: float = 0.0) -> float:
        """Return the seconds of a start without its first prompt, as in `loading_seconds`."""
        s = self.runtime.startup
        return self.loading_seconds(fetch, load, clear) + s.init_s + s.warm_up_s

    def loading_seconds(self, fetch: float, load: float, clear: float = 0.0) -> float:
        """Return the seconds until both the engine's process and its weights are there.

        They are those of HydraServe's Eq. 5 with every overlap, and of its Eq. 1 with none.

        Args:
            fetch: Seconds from the source to the node's memory.
            load: Seconds on to the device.
            clear: Seconds until the device has room. The engine starts meanwhile, and bytes move
                afterwards.
        """
        s = self.runtime.startup
        context = max(clear, s.container_s + s.context_s)
        engine = max(clear, s.container_s + s.context_s + s.libraries_s)
        if not s.prefetch:
            fetched = engine + fetch
            loaded = max(fetched, engine + load) if s.stream else fetched + load
        else:
            begin, fetched = context if s.overlap else engine, clear + fetch
            loaded = max(begin + load, fetched) if s.stream else max(begin, fetched) + load
        return max(loaded, engine)

    def ask_of(self, model: SimModel, missing: int = 1) -> Ask:
        """Return the demand for one more instance of the `missing` ones."""
        now, first, group = self.clock.now, model.queue[0], model.group
        heavy = group.heavy
        return Ask(
            model.name,
            model.need,
            now - first.arrived,
            len(model.queue),
            f"{model.name}#{first.number}",
            deadline_s=first.arrived + group.slo_ttft - now if group.has_ttft_objective else None,
            slo_ttft_s=group.slo_ttft if group.has_ttft_objective else None,
            slo_tpot_s=group.slo_tpot,
            priority=group.priority,
            is_heavy=heavy,
            is_extra=bool(model.instances) and not self.runtime.exclusive,
            exec_s=model.exec_seconds(first.prompt, model.mean_output),
            prompt_tokens=first.prompt,
            output_tokens=model.mean_output,
            start_s=self._least_start_anywhere(model),
            missing_workers=missing,
        )

    def _least_start_anywhere(self, model: SimModel) -> float:
        """Return the least seconds until the model is ready on any node; 0 on exclusive devices.

        Requests execute during the load there, and bind one by one.
        """
        nodes = [n for n in model.nodes if n.alive] if not self.runtime.exclusive else []
        restores = [self._restore_seconds(n, model) for n in nodes if f"snapshot:{model.name}" in n.dram]
        return min([*restores, *(self._least_start_seconds(n, model) for n in nodes)], default=0.0)

    def is_suspended_when_evicted(self, instance: Instance) -> bool:
        """True if an idle instance is suspended for others because it returns sooner from that.

        A snapshot has the weights, so it takes the place of their copy in host memory, unless that
        is being loaded to another device. It displaces nothing else, because other models would
        then load from slower tiers. The weights of a new start may still be on the device.
        Exclusive devices restore no snapshots.
        """
        node, model = instance.parts[0].device.node, instance.model
        if "suspend" not in self.can or self.runtime.exclusive or not can_have_snapshot(instance):
            return False
        if model.snapshot > node.dram.free + node.dram.evictable_bytes(model.name):
            return False
        load = 0.0 if "reuse" in self.can else model.weights / min(link.bandwidth for link in node.devices[0].path)
        return self._restore_seconds(node, model) < self.startup_seconds(0.0, load)

    def _restore_seconds(self, node: SimNode, model: SimModel) -> float:
        """Return the seconds to restore a snapshot over links that nothing else uses."""
        return self.runtime.startup.restore_s + model.snapshot / min(link.bandwidth for link in node.devices[0].path)

    def demand_of(self, model: SimModel) -> Demand:
        live = running = 0
        for instance in model.instances.values():
            if not instance.moving:
                live += len(instance.parts)  # a pipeline may become as many instances (HydraServe §6.1)
                running += len(instance.runs)
        return Demand(
            model.name,
            len(model.queue),
            running,
            live,
            model.capacity,
            model.in_window(self.clock.now, self.runtime.window_s),
            model.group.replicas_min,
            model.group.replicas_max,
            model.peak,
        )


def can_have_snapshot(instance: Instance) -> bool:
    """True for a whole instance whose model has no snapshot on its node."""
    node = instance.parts[0].device.node
    return len(instance.parts) == 1 and f"snapshot:{instance.model.name}" not in node.dram
