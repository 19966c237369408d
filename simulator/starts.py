"""Simulate starts of instances.

Memory is reserved first. Loads then run beside the engine's start, until the instance is ready.
"""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.domain.policies.port import Option
from simulator.hardware import Tier
from simulator.instances import Instance, Part, SimDevice, SimModel, SimNode
from simulator.links import Flow
from simulator.options import Options, fetch_name
from simulator.shared_fetches import Key
from simulator.world import World


class Start:
    """An instance that is starting.

    Attributes:
        outstanding: Number of parts that must end before it is ready.
        victims: Reusable weights that may be dropped.
    """

    def __init__(self, instance: Instance, way: str, victims: tuple[str, ...], ready: Callable[[Instance], None]) -> None:
        self.instance, self.way, self.victims, self.ready = instance, way, victims, ready
        self.flows: list[Flow] = []
        self.releases: list[Callable[[], None]] = []
        """Functions that leave the shared fetches, and unpin weights in host memory."""
        self.recorded: list[tuple[str, str, Key]] = []
        """Its fetches in the ledgers: node, name there, and shared fetch."""
        self.outstanding = 0
        self.begun = False
        self.promised: dict[str, int] = {}
        self.resident = 0
        self.peer: SimDevice | None = None
        self.snapshot = 0
        """Bytes of the snapshot that it is restored from."""
        self.given_up = False


class Starts:
    def __init__(self, world: World, options: Options) -> None:
        self._world, self._options = world, options
        self.waiting: dict[str, list[Start]] = {}
        """By device, starts that wait for memory, in order."""
        self.under_way: dict[str, Start] = {}

    def create(
        self, model: SimModel, option: Option, key: str, finished: Callable[..., None], ready: Callable[[Instance], None]
    ) -> Start:
        """Promise the memory; `begin` starts once it is free."""
        world = self._world
        devices = [world.devices[k] for k in option.key]
        stage = -(-model.need // option.stages)
        parts = [Part(d, model.need if n < option.full_workers or option.stages == 1 else stage) for n, d in enumerate(devices)]
        instance = Instance(key, model, parts, world.clock, world.runtime, finished)
        instance.predicted, instance.source = option.cost.total_s, option.source
        start = Start(instance, option.way, option.clearance.victims, ready)
        instance.prompt_predicted = model.queue[0].prompt if model.queue and "prefill" in option.cost.phases else 0
        if option.way == "peer_copy":
            start.peer = world.devices[option.source]
        if option.way == "restore":
            start.snapshot = self._options.snapshots.pop((devices[0].node.name, model.name))
        for part in parts:
            kept = part.device.kept.get(model.name)
            own = kept.nbytes if kept is not None and option.way == "reuse" else 0
            start.resident = own
            start.promised[part.device.key] = part.nbytes - own
            part.device.promised += part.nbytes - own
            part.device.instances[key] = instance
            part.device.starting.add(key)
            self.waiting.setdefault(part.device.key, []).append(start)
            world.touch(part.device)
        model.instances[key] = instance
        self.under_way[key] = start
        world.outcome.stages.append(option.stages)
        return start

    def retry_waiting(self, device: SimDevice) -> None:
        """Retry the starts that wait for memory of a device."""
        for start in list(self.waiting.get(device.key, ())):
            self.begin(start)

    def begin(self, start: Start) -> None:
        """Take the promised memory once all of it is free beside that of older starts.

        Otherwise a later start could take memory that an older one waits for, which then would wait
        for the later one's victims (services/scheduler/domain/reconcile.py has the same rule).
        """
        world = self._world
        if start.begun or start.given_up or not all(self._make_room(start, p) for p in start.instance.parts):
            return
        start.begun = True
        for part in start.instance.parts:
            device = part.device
            if start.way == "reuse":
                start.resident = device.drop(start.instance.model.name)
            else:
                device.drop(start.instance.model.name)
            device.promised -= start.promised[device.key]
            device.booked += part.nbytes
            self.waiting[device.key].remove(start)
            world.touch(device)
        self._load(start)

    def _make_room(self, start: Start, part: Part) -> bool:
        """Drop reusable weights, chosen ones first; instances have to stop by themselves."""
        device, name = part.device, start.instance.model.name
        own = device.kept[name].nbytes if name in device.kept else 0
        waiting = self.waiting[device.key]
        older = waiting[: waiting.index(start)]
        reused = {s.instance.model.name for s in older if s.way == "reuse"}
        others = [k for k in device.kept.values() if k.model != name and k.model not in reused]
        need, before = part.nbytes - own, sum(s.promised[device.key] for s in older)
        if need + before > device.room + sum(k.nbytes for k in others):
            return False
        short = need - device.room
        if short <= 0:
            return True
        chosen = {v.removeprefix("weights:"): n for n, v in enumerate(start.victims)}
        for kept in sorted(others, key=lambda k: (chosen.get(k.model, len(chosen)), k.last_used, k.model)):
            short -= device.drop(kept.model, short)
            if short <= 0:
                break
        return True

    def _load(self, start: Start) -> None:
        world, instance = self._world, start.instance
        model, now, s = instance.model, world.clock.now, world.runtime.startup
        instance.loading_since = now
        self.expect(start)  # until all of it is under way
        if start.way == "restore":
            self._restore(start)
        elif start.way == "peer_copy":
            self._copy(start)
        else:
            context = instance.began + s.container_s + s.context_s
            engine = context + s.libraries_s
            self.expect(start)
            world.clock.at(max(now, engine), lambda: self.on_arrived(start))
            stages = len(instance.parts)
            missing = model.stage_weights(stages) if stages > 1 else [model.weights - start.resident]
            tier = instance.parts[0].device.node.tier(model.name)
            self._count("pipeline" if stages > 1 else "reuse" if start.resident else tier)
            for part, nbytes in zip(instance.parts, missing, strict=True):
                part.device.loading[instance.key] = model.group.heavy
                Load(self._world, self._options, self, start, part, nbytes, max(now, context), max(now, engine))
        self.on_arrived(start)

    def _restore(self, start: Start) -> None:
        """Restore a snapshot from the node's memory."""
        world, part, model = self._world, start.instance.parts[0], start.instance.model
        node = part.device.node
        self._count("snapshot")
        self.expect(start)

        def on_restored() -> None:
            self._options.end_snapshot(node, model)
            world.clock.call_later(world.runtime.startup.restore_s, lambda: self.on_arrived(start))

        start.flows.append(node.network.start(part.device.path, start.snapshot, on_restored))

    def _copy(self, start: Start) -> None:
        """Copy from one device to another of the same node."""
        device = start.instance.parts[0].device
        link = device.node.peer(start.peer, device) if start.peer is not None else None
        self._count("peer")
        self.expect(start)
        path = (link,) if link is not None else device.path
        start.flows.append(device.node.network.start(path, start.instance.model.weights, lambda: self.on_arrived(start)))

    def _count(self, tier: str) -> None:
        loads = self._world.outcome.loads
        loads[tier] = loads.get(tier, 0) + 1

    def expect(self, start: Start) -> None:
        start.outstanding += 1

    def on_arrived(self, start: Start) -> None:
        start.outstanding -= 1
        if start.outstanding == 0 and not start.given_up:
            cheap = start.way in ("restore", "peer_copy") or (self._world.runtime.exclusive and self._world.runtime.late_execution)
            s = self._world.runtime.startup
            self._world.clock.call_later(0.0 if cheap else s.init_s + s.warm_up_s, lambda: self._on_ready(start))

    def _on_ready(self, start: Start) -> None:
        if start.given_up:
            return
        world, instance = self._world, start.instance
        del self.under_way[instance.key]
        instance.state, instance.ready_at = "ready", world.clock.now
        instance.idle_since = world.clock.now
        instance.load_s = world.clock.now - instance.began
        world.outcome.startup.append(instance.load_s)
        for part in instance.parts:
            part.device.loading.pop(instance.key, None)
            part.device.starting.discard(instance.key)
            world.touch(part.device)
        start.ready(instance)

    def give_up(self, start: Start) -> None:
        """Cancel a start and free its memory."""
        start.given_up = True
        world, instance = self._world, start.instance
        self.under_way.pop(instance.key, None)
        instance.model.instances.pop(instance.key, None)
        instance.state = "gone"
        node = instance.parts[0].device.node
        if start.way == "restore" and not start.begun and node.alive:
            self._options.snapshots[node.name, instance.model.name] = start.snapshot
        for release in start.releases:
            release()
        for name, fetch, key in start.recorded:
            if fetch == instance.key or not world.fetches.under_way(key):
                self._options.fetch_ended(name, fetch)
        for flow in start.flows:
            for node in {id(p.device.node): p.device.node for p in instance.parts}.values():
                node.network.cancel(flow)
        for part in instance.parts:
            device = part.device
            device.instances.pop(instance.key, None)
            device.loading.pop(instance.key, None)
            device.starting.discard(instance.key)
            if start.begun:
                device.booked -= part.nbytes
            else:
                device.promised -= start.promised[device.key]
                self.waiting[device.key].remove(start)
            world.touch(device)
        for part in instance.parts:
            if part.device.node.alive:
                self.retry_waiting(part.device)


class Load:
    """Load of one part: to the node's memory and on to the device, overlapped.

    The overlap is as large as possible.
    """

    def __init__(
        self,
        world: World,
        options: Options,
        starts: Starts,
        start: Start,
        part: Part,
        missing: float,
        context: float,
        engine: float,
    ) -> None:
        self._world, self._options, self._starts, self._start = world, options, starts, start
        self._part, self._missing, self._model = part, missing, start.instance.model
        self._node, s = part.device.node, world.runtime.startup
        self._merge = options.merge_seconds(part.device, self._model)
        self._tier = self._node.tier(self._model.name)
        self._path = self._node.source(self._tier)
        self._copy_at = context if s.overlap and s.prefetch else engine
        self._pinned = False
        starts.expect(start)
        self._node.record_use(self._model.name)
        if not self._path:
            self._node.dram.pin(self._model.name)
            self._pinned = True
            start.releases.append(self._unpin)
            world.clock.at(self._copy_at + self._merge, self._copy)
            return
        parts = start.instance.parts
        self._key = (self._node.name, self._model.name, parts.index(part), len(parts))
        self._shared = not start.resident or world.shares_fetch(self._node, self._model)
        self._name = fetch_name(self._model.name, self._key[2], len(parts)) if self._shared else start.instance.key
        if self._tier == "remote":
            start.recorded.append((self._node.name, self._name, self._key))
            if not (self._shared and world.fetches.under_way(self._key)):
                options.fetch_begun(self._node.name, self._name, missing, self._model)
        if s.stream:
            starts.expect(start)
            world.clock.at(self._copy_at + self._merge, self._copy)
        world.clock.at(world.clock.now if s.prefetch else engine, self._fetch)

    def _fetch(self) -> None:
        start = self._start
        if start.given_up:
            return
        if self._shared:
            join = self._world.fetches.join
            start.releases.append(join(self._node, self._key, self._path, self._missing, self._on_fetched))
        else:
            start.flows.append(self._node.network.start(self._path, self._missing, self._on_fetched))

    def _on_fetched(self) -> None:
        world, now = self._world, self._world.clock.now
        if self._path:
            self._options.fetch_ended(self._node.name, self._name)
        if len(self._start.instance.parts) == 1 and not self._start.resident:
            cache_weights(world, self._node, self._model, self._tier)
        if world.runtime.startup.stream:
            self._starts.on_arrived(self._start)
        else:
            world.clock.at(max(now, self._copy_at) + self._merge, self._copy)

    def _copy(self) -> None:
        if not self._start.given_up:
            self._start.flows.append(self._node.network.start(self._part.device.path, self._missing, self._on_copied))

    def _unpin(self) -> None:
        """Unpin the weights in host memory, once: after the copy, or if the start is given up."""
        if self._pinned:
            self._pinned = False
            self._node.dram.unpin(self._model.name)

    def _on_copied(self) -> None:
        self._unpin()
        self._part.device.loading.pop(self._start.instance.key, None)
        self._starts.on_arrived(self._start)


def cache_weights(world: World, node: SimNode, model: SimModel, tier: Tier) -> None:
    """Cache a fetched model in the node's memory and on its disk, if there is room."""
    if tier == "remote" and world.runtime.cache_ssd:
        node.ssd.add(model.name, model.weights)
    if world.runtime.cache_dram:
        node.dram.add(model.name, model.weights)
    world.touch_node(node)
