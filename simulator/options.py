"""List the options for making a simulated model ready, with predicted cost.

Options that need a missing capability are not built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from services.scheduler.domain.cost.cost import Cost, Way
from services.scheduler.domain.policies import pipelines
from services.scheduler.domain.policies.port import NOTHING_TO_CLEAR, Ask, Capability, Clearance, Option
from simulator.config import Batching
from simulator.instances import SimDevice, SimModel, SimNode
from simulator.policies.hydraserve_ledger import Ledger, accepts, record_begin, record_end, share
from simulator.world import World

_NEEDS: dict[str, Capability] = {"suspend": "suspend", "preempt": "preempt", "migrate": "migrate"}


def fetch_name(model: str, stage: int, stages: int) -> str:
    """Return the name of a shared fetch in the ledger of its node."""
    return f"{model} {stage}/{stages}"


class Options:
    def __init__(self, world: World) -> None:
        self._world = world
        self.ledgers = {n: Ledger(node.nic.bandwidth) for n, node in world.nodes.items()}
        """Fetches under way in HydraServe's ledgers (Eq. 3 and 4)."""
        self.snapshots: dict[tuple[str, str], int] = {}
        """Suspended instances by node and model, in bytes."""
        self._displaced: set[tuple[str, str]] = set()
        """Nodes and models whose snapshot took the place of the weights in host memory."""

    def displace_weights(self, node: SimNode, model: SimModel) -> None:
        """Give the place of the weights in host memory to a snapshot, which contains them."""
        node.dram.remove(model.name)
        self._displaced.add((node.name, model.name))

    def end_snapshot(self, node: SimNode, model: SimModel) -> None:
        """Free a snapshot that is restored; weights that it displaced stay in host memory."""
        dram, name = node.dram, f"snapshot:{model.name}"
        dram.unpin(name)
        dram.remove(name)
        if (node.name, model.name) in self._displaced:
            self._displaced.remove((node.name, model.name))
            if model.weights <= dram.free:
                dram.add(model.name, model.weights)
                self._world.touch_node(node)

    def drop_snapshots(self, node: str) -> None:
        """Forget the snapshots of a node that has failed."""
        self.snapshots = {at: nbytes for at, nbytes in self.snapshots.items() if at[0] != node}
        self._displaced = {at for at in self._displaced if at[0] != node}

    def fetch_begun(self, node: str, key: str, nbytes: float, model: SimModel) -> None:
        now = self._world.clock.now
        deadline = now + model.group.slo_ttft if model.group.has_ttft_objective else inf
        self.ledgers[node] = record_begin(self.ledgers[node], key, int(nbytes), deadline, now)

    def fetch_ended(self, node: str, key: str) -> None:
        self.ledgers[node] = record_end(self.ledgers[node], key, self._world.clock.now)

    def list_options(self, ask: Ask, model: SimModel) -> list[Option]:
        world = self._world
        found: list[Option] = []
        for node in model.nodes:
            if node.alive:
                for device in node.devices:
                    if world.runtime.exclusive:
                        found += self._iter_exclusive(ask, model, device)
                    elif not any(i.model is model for i in device.instances.values()):
                        found += self._iter_shared(ask, model, device)
        if "pipeline" in world.can and not world.runtime.exclusive:
            found += self._pipelines(ask, model)
        return found

    # Devices that run one request at a time (Torpor).

    def _iter_exclusive(self, ask: Ask, model: SimModel, device: SimDevice) -> Iterator[Option]:
        if device.busy or device.starting:
            return
        world = self._world
        here = next((i for i in device.instances.values() if i.model is model), None)
        if here is not None:
            if here.open:
                cost = Cost(ask.exec_s, {"prefill": ask.exec_s})
                yield Option((world.view(device),), "ready", cost, resident_bytes=model.weights, source="ready")
            return
        clearance = self._clearance(ask, device, model.need)
        if clearance is None:
            return
        clear, is_late = self._clear_seconds(device, model, model.need, clearance), world.runtime.late_execution
        if "peer_copy" in world.can:
            ready_on = [p.device for i in model.instances.values() if i.state == "ready" for p in i.parts]
            holders = [
                (link.bandwidth, d.key, link)
                for d in device.node.devices
                if d is not device and d in ready_on and (link := device.node.peer(d, device)) is not None
            ]
            if holders:
                _, key, link = max(holders, key=lambda h: (h[0], h[1]))
                took = device.node.network.estimate_seconds((link,), model.weights)
                total = max(took, ask.exec_s) if is_late else took + ask.exec_s
                phases = {"clear": clear, "load": took, "prefill": ask.exec_s}
                yield self._option(device, model, "peer_copy", clearance, phases, clear + total, source=key)
                return
        fetch, load = world.transfer_seconds(device, model, model.weights)
        if is_late:
            total = max(world.loading_seconds(fetch, load, clear), clear + ask.exec_s)
        else:
            total = world.startup_seconds(fetch, load, clear) + ask.exec_s
        phases = {"clear": clear, "load": world.loading_seconds(fetch, load), "prefill": ask.exec_s}
        yield self._option(device, model, "load", clearance, phases, total, source=device.node.tier(model.name))

    # Devices that instances share by memory.

    def _iter_shared(self, ask: Ask, model: SimModel, device: SimDevice) -> Iterator[Option]:
        world, node = self._world, device.node
        kept = device.kept.get(model.name) if "reuse" in world.can else None
        resident = min(kept.nbytes, model.weights) if kept is not None else 0
        clearance = self._clearance(ask, device, model.need - resident)
        if clearance is None:
            return
        first = model.prefill_seconds(ask.prompt_tokens, model.service_on(node.group.kind))
        clear = self._clear_seconds(device, model, model.need - resident, clearance)
        snapshot = self.snapshots.get((node.name, model.name))
        if snapshot is not None and "suspend" in world.can:
            took = node.network.estimate_seconds(device.path, snapshot) + world.runtime.startup.restore_s
            phases = {"clear": clear, "restore": took, "prefill": first}
            yield self._option(device, model, "restore", clearance, phases, clear + took + first, source="snapshot")
        missing = model.weights - resident
        tier = node.tier(model.name)
        path = node.source(tier)
        fetch = world.fetches.estimate_seconds(node, model.name, path, missing)
        load = node.network.estimate_seconds(device.path, missing)
        merge = self.merge_seconds(device, model) if resident or device.kept else 0.0
        total = world.startup_seconds(fetch, load + merge, clear) + first
        phases = {"clear": clear, "fetch": fetch, "load": load, "merge": merge, "prefill": first}
        way: Way = "reuse" if resident else "load"
        yield self._option(device, model, way, clearance, phases, total, source=tier, resident=resident)

    def make_plain(self, model: SimModel, device: SimDevice, tier: str) -> Option:
        """Return the option of loading where there is room."""
        total = self._world.start_seconds(device, model, model.weights)
        return Option((self._world.view(device),), "load", Cost(total), source=tier)

    def merge_seconds(self, device: SimDevice, model: SimModel) -> float:
        """Return the seconds to move memory regions for new tensors.

        This is stage 2 of Tangram §3.2.2.
        """
        speed = self._world.runtime.merge_gb_per_second
        if speed is None:
            return 0.0
        lying = device.kept_bytes - (device.kept[model.name].nbytes if model.name in device.kept else 0)
        return lying * self._world.runtime.merge_share / (speed * 1e9)

    def _clearance(self, ask: Ask, device: SimDevice, need: int) -> Clearance | None:
        """Return the clearance of `need` bytes; None: impossible, or not yet."""
        world = self._world
        if need > device.budget:
            return None
        short = need - world.free(device)
        if short <= 0:
            return NOTHING_TO_CLEAR
        if short > self._at_most(device):
            return None
        view = world.view(device)
        leaving_bytes = sum(r.nbytes for r in view.residents if r.state == "leaving")
        if short <= leaving_bytes:
            return Clearance("leaving", freed_bytes=leaving_bytes)
        return self.choose_victims(ask, device, short - leaving_bytes)

    def choose_victims(self, ask: Ask, device: SimDevice, short: int) -> Clearance | None:
        """Return the policy's clearance of so many bytes, if the system can carry it out."""
        world = self._world
        found = world.profile.clear(ask, world.view(device), short, world.clock.now)
        if found is None or (needed := _NEEDS.get(found.how)) is None or needed in world.can:
            return found
        return replace(found, how="evict") if found.how == "suspend" and self._all_idle(device, found) else None

    def _clear_seconds(self, device: SimDevice, model: SimModel, need: int, clearance: Clearance) -> float:
        """Return the seconds until `need` bytes are free.

        Instances have to leave; reusable weights are dropped when the memory is taken.
        """
        own = device.kept[model.name].nbytes if model.name in device.kept else 0
        if need - self._world.free(device) <= device.kept_bytes - own:
            return 0.0
        return clearance.delay_s + self._world.runtime.startup.leave_s

    def _at_most(self, device: SimDevice) -> int:
        """Return the bytes that could become free there at most."""
        found = device.kept_bytes
        for instance in device.instances.values():
            if instance.state == "leaving" or (instance.state == "ready" and (self._world.interrupts or not instance.runs)):
                parts = instance.parts
                found += parts[0].nbytes if len(parts) == 1 else sum(p.nbytes for p in parts if p.device is device)
        return found

    @staticmethod
    def _all_idle(device: SimDevice, found: Clearance) -> bool:
        return not any(i.runs for k, i in device.instances.items() if k in found.victims)

    def _option(
        self,
        device: SimDevice,
        model: SimModel,
        way: Way,
        clearance: Clearance,
        phases: dict[str, float],
        total: float,
        source: str,
        resident: int = 0,
    ) -> Option:
        service = model.service_on(device.node.group.kind)
        tpot = service.tpot_ms / 1e3 if isinstance(service, Batching) else 0.0
        exclusive = self._world.runtime.exclusive  # instances never compute at the same time there
        sharing = 0 if exclusive else len(device.instances) - sum(k in clearance.victims for k in device.instances)
        view = self._world.view(device)
        return Option((view,), way, Cost(total, phases), clearance, resident, source, tpot_s=tpot, sharing=max(0, sharing))

    # Pipelines (HydraServe's Algorithm 1).

    def _pipelines(self, ask: Ask, model: SimModel) -> Iterator[Option]:
        world, s = self._world, self._world.runtime.startup
        servers = list(self._list_servers(model))
        if not servers:
            return
        service = model.group.service
        first = model.prefill_seconds(ask.prompt_tokens)
        times = pipelines.Times(
            first,
            service.tpot_ms / 1e3 if isinstance(service, Batching) else 0.0,
            world.runtime.hop_s,
            s.container_s + s.context_s + s.libraries_s,
            s.container_s,
            s.context_s,
            s.libraries_s,
        )
        overlapped = s.prefetch and s.stream and s.overlap
        for scheme in pipelines.schemes(model.weights, model.need, servers, times, overlapped=overlapped):
            ttft = self._predict_ttft(model, scheme, times, overlapped) if scheme.stages > 1 else None
            if ttft is not None:
                devices = tuple(world.view(world.devices[x.key]) for x in scheme.servers)
                total = ttft + s.init_s + s.warm_up_s
                cost = Cost(total, {"fetch": total - first, "prefill": first})
                yield Option(
                    devices,
                    "pipeline",
                    cost,
                    source="remote",
                    stages=scheme.stages,
                    full_workers=scheme.full,
                    tpot_s=scheme.tpot,
                    sharing=scheme.sharing,
                )

    def _list_servers(self, model: SimModel) -> Iterator[pipelines.Server]:
        """Yield the devices for stages.

        On a node that fetches a stage already they have the bandwidth of one that joins it.
        """
        world, now = self._world, self._world.clock.now
        for node in model.nodes:
            if not node.alive or node.tier(model.name) != "remote":
                continue
            ledger = self.ledgers[node.name]
            joins = any(fetch_name(model.name, n, s) in ledger.fetches for s in range(2, pipelines.STAGES + 1) for n in range(s))
            if not joins and not accepts(ledger, now):
                continue
            network = share(ledger, now, joins=joins)
            for device in node.devices:
                if not any(i.model is model for i in device.instances.values()) and (free := world.free(device)) > 0:
                    speed = min(link.bandwidth for link in device.path)
                    yield pipelines.Server(device.key, node.name, free, network, speed, len(device.instances))

    def _predict_ttft(self, model: SimModel, scheme: pipelines.Scheme, times: pipelines.Times, overlapped: bool) -> float | None:
        """Return Eq. 5 (or 1), where stages join the fetches of their bytes that are under way.

        A stage that joins none needs room on the node's link (Eq. 3); None: it has none.
        """
        now, servers = self._world.clock.now, []
        for n, x in enumerate(scheme.servers):
            ledger = self.ledgers[x.node]
            if fetch_name(model.name, n, scheme.stages) in ledger.fetches:
                servers.append(x)
            elif accepts(ledger, now):
                servers.append(replace(x, network=share(ledger, now)))
            else:
                return None
        formula = pipelines.ttft_overlapped if overlapped else pipelines.ttft_in_turn
        return formula(model.weights, scheme.stages, scheme.full, servers, times)
