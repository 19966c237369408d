"""Node failures: listed ones, or random ones with a mean time between failures."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from simulator.controller import Controller
from simulator.instances import Instance, Run, SimNode
from simulator.world import World

Fail = Callable[[SimNode, float], None]
"""Called with a node that fails, and the seconds until it is back."""


def schedule(world: World, controller: Controller) -> None:
    schedule_failures(world, Nodes(world, controller).fail)


def schedule_failures(world: World, fail: Fail) -> None:
    """Call `fail` at each node failure."""
    failures = world.cluster.failures
    for event in failures.events:
        world.clock.at(event.at, lambda e=event: fail(world.nodes[e.node], e.seconds))  # type: ignore[misc]
    if failures.mtbf_s is not None:
        for name in world.nodes:
            Drawn(world, fail, world.nodes[name], Random(f"{world.seed}:{name}"), failures.mtbf_s, failures.mttr_s)


class Nodes:
    def __init__(self, world: World, controller: Controller) -> None:
        self._world, self._controller = world, controller

    def fail(self, node: SimNode, seconds: float) -> None:
        """Fail a node: its memories are lost, its disk is not."""
        if not node.alive:
            return
        world, controller = self._world, self._controller
        node.alive = False
        interrupted: dict[Run, None] = {}
        gone: dict[str, Instance] = {i.key: i for d in node.devices for i in d.instances.values()}
        for instance in gone.values():
            start = controller.starts.under_way.get(instance.key)
            if start is not None:
                if instance.bound is not None:
                    interrupted[instance.bound] = None
                controller.stops.count(instance)
                controller.starts.give_up(start)
            else:
                interrupted.update(dict.fromkeys(controller.stops.drop(instance)))
            controller.migrations.on_lost(instance)
        world.fetches.drop(node.name)
        for flow in list(node.network.flows):
            node.network.cancel(flow)
        node.dram.clear()
        controller.options.drop_snapshots(node.name)
        for device in node.devices:
            device.kept.clear()
            device.kept_bytes = 0
            device.loading.clear()
            world.touch(device)
        world.outcome.restarts += len(interrupted)
        if world.runtime.failover == "restart":
            for run in interrupted:
                run.tokens = 0
        world.clock.call_later(seconds, lambda: self._recover(node))
        controller.requeue(sorted(interrupted, key=lambda r: r.number))

    def _recover(self, node: SimNode) -> None:
        node.alive = True
        self._world.touch_node(node)
        self._controller.pump()


class Drawn:
    """Random failures of one node."""

    def __init__(self, world: World, fail: Fail, node: SimNode, random: Random, mtbf_s: float, mttr_s: float) -> None:
        self._world, self._fails, self._node, self._random = world, fail, node, random
        self._mtbf, self._mttr = mtbf_s, mttr_s
        self._schedule_next()

    def _schedule_next(self) -> None:
        self._world.clock.call_later(self._random.expovariate(1.0 / self._mtbf), self._fail)

    def _fail(self) -> None:
        down = self._random.expovariate(1.0 / self._mttr)
        self._fails(self._node, down)
        self._world.clock.call_later(down, self._schedule_next)
