"""A node's loader in simulated time: loads, caches and prefetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from shared.contracts.loader import PrefetchWeights
from shared.contracts.phases import Phase
from simulator.instances import SimNode
from simulator.links import Flow, Link
from simulator.mesh.machine import MeshInstance, MeshNode
from simulator.world import World

Arrived = Callable[[Phase], None]


class Weights:
    """The loaders.

    Args:
        world: The models and the clock.
        report: Called when the status of a node's loader has changed.
    """

    def __init__(self, world: World, report: Callable[[MeshNode], None]) -> None:
        self._world, self._report = world, report
        self._prefetches: dict[tuple[str, str], Flow] = {}
        """By node and model."""

    def load(self, node: MeshNode, instance: MeshInstance, arrived: Arrived) -> None:
        """Load to the node's memory (`fetch`) and to the device (`load`), pipelined."""
        world, sim, name = self._world, node.sim, instance.model
        if node.residency:
            self._load_units(node, instance, arrived)
            return
        nbytes = world.models[name].weights
        instance.tier = sim.tier(name)
        world.outcome.loads[instance.tier] = world.outcome.loads.get(instance.tier, 0) + 1
        missing = self.drop_prefetches(node).get(name, float(nbytes))

        def on_fetched() -> None:
            self._cache(sim, name)
            self.hold(instance)
            self._report(node)
            arrived(Phase.FETCH)

        path = sim.source(instance.tier) if instance.tier != "dram" else ()
        if path:
            leave = world.fetches.join(sim, (sim.name, name, 0, 1), path, missing, on_fetched, lacking=nbytes)
            instance.leaves.append(leave)
        else:
            sim.dram.touch(name)
            world.clock.call_later(0.0, on_fetched)
        instance.flows.append(sim.network.start(instance.device.path, nbytes, lambda: arrived(Phase.LOAD)))

    def _load_units(self, node: MeshNode, instance: MeshInstance, arrived: Arrived) -> None:
        """Load what a separate device lacks: from the node's memory and other devices at once."""
        world, sim, name = self._world, node.sim, instance.model
        nbytes, device = world.models[name].weights, instance.device
        mine = node.residency[device.key]
        missing = mine.reserve(name, nbytes, instance.key)
        instance.tier = sim.tier(name)
        way = instance.tier if missing == nbytes else "reuse"
        world.outcome.loads[way] = world.outcome.loads.get(way, 0) + 1
        lacking = min(missing, self.drop_prefetches(node).get(name, missing))

        def on_fetched() -> None:
            if missing == nbytes:
                self._cache(sim, name)
                self._report(node)
            arrived(Phase.FETCH)

        path = sim.source(instance.tier) if instance.tier != "dram" else ()
        if path and lacking and (missing == nbytes or world.shares_fetch(sim, world.models[name])):
            leave = world.fetches.join(sim, (sim.name, name, 0, 1), path, lacking, on_fetched, lacking=missing)
            instance.leaves.append(leave)
        elif path and lacking:
            instance.flows.append(sim.network.start(path, lacking, on_fetched))
        else:
            sim.dram.touch(name)
            world.clock.call_later(0.0, on_fetched)
        shares = self._shares(node, instance, missing)
        outstanding = [len(shares)]

        def on_copied() -> None:
            outstanding[0] -= 1
            if not outstanding[0]:
                mine.complete(name)
                self._report(node)
                arrived(Phase.LOAD)

        def copy() -> None:
            if not instance.ended:
                instance.flows += [sim.network.start(way, part, on_copied) for way, part in shares]

        world.clock.call_later(world.runtime.startup.copy_s, copy)

    def _cache(self, sim: SimNode, name: str, tier: Literal["dram", "ssd"] = "dram") -> None:
        """Cache fetched weights on the node's disk and, unless `tier` is ssd, in its memory."""
        runtime, nbytes = self._world.runtime, self._world.models[name].weights
        if runtime.cache_dram and tier == "dram":
            sim.dram.add(name, nbytes)
        if runtime.cache_ssd:
            sim.ssd.add(name, nbytes)

    @staticmethod
    def _shares(node: MeshNode, instance: MeshInstance, missing: int) -> list[tuple[tuple[Link, ...], float]]:
        """Divide a load between the host link and the fastest link from another device.

        Both end at about the same time (weights/store/peers.py).
        """
        sim, device = node.sim, instance.device
        found = [
            (link, node.residency[other.key].count_copyable(instance.model))
            for other in sim.devices
            if other is not device and (link := sim.peer(other, device)) is not None
        ]
        link, there = max(found, key=lambda f: (f[1], f[0].bandwidth), default=(None, 0))
        if link is None or not there:
            return [(device.path, missing)]
        host = min(part.bandwidth for part in device.path)
        peer = min(there, missing * link.bandwidth / (link.bandwidth + host))
        return [(device.path, missing - peer), ((link,), peer)]

    @staticmethod
    def expect(node: MeshNode, likelihood: dict[str, float]) -> None:
        """Price reusable weights by their models' likelihood times latency sensitivity."""
        for residency in node.residency.values():
            residency.likelihood = likelihood

    @staticmethod
    def end(instance: MeshInstance) -> None:
        """End a load."""
        instance.ended = True
        for leave in instance.leaves:
            leave()
        for flow in instance.flows:
            instance.node.network.cancel(flow)

    @staticmethod
    def hold(instance: MeshInstance) -> None:
        """Pin the weights that an instance uses in its node's memory."""
        if not instance.holds:
            instance.holds = True
            instance.node.dram.pin(instance.model)

    def release(self, node: MeshNode, instance: MeshInstance) -> None:
        """Give up what an instance that has ended held of its device and of its node's memory."""
        self.unpin(instance)
        if node.residency:
            node.residency[instance.device.key].release(instance.model, instance.key, self._world.clock.now)

    @staticmethod
    def unpin(instance: MeshInstance) -> None:
        if instance.holds:
            instance.holds = False
            instance.node.dram.unpin(instance.model)

    def prefetch(self, node: MeshNode, command: PrefetchWeights) -> None:
        """Prefetch in the background of all links."""
        name, sim = command.card.name, node.sim
        if not node.alive or (node.name, name) in self._prefetches or self._world.fetches.under_way((node.name, name, 0, 1)):
            return
        path, nbytes = sim.source(sim.tier(name)), self._world.models[name].weights
        if not path or (command.tier == "ssd" and name in sim.ssd):
            return

        def on_prefetched() -> None:
            del self._prefetches[node.name, name]
            self._cache(sim, name, command.tier)
            self._report(node)

        self._prefetches[node.name, name] = sim.network.start(path, nbytes, on_prefetched, background=True)

    def cancel_prefetch(self, node: MeshNode, name: str) -> None:
        if (flow := self._prefetches.pop((node.name, name), None)) is not None:
            node.sim.network.cancel(flow)

    def drop_prefetches(self, node: MeshNode) -> dict[str, float]:
        """Cancel prefetches when a request waits for the link; keep what has been loaded.

        Returns:
            The bytes that each lacked.
        """
        lacking = {}
        for name in [n for where, n in self._prefetches if where == node.name]:
            flow = self._prefetches.pop((node.name, name))
            node.sim.network.cancel(flow)
            lacking[name] = flow.left
        return lacking
