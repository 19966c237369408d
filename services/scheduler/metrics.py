"""Prometheus metrics of a scheduler: predictions and outcomes of plans, nodes, and devices."""

from __future__ import annotations

import contextlib
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from services.scheduler.adapters.present_values import PresentValues, Value
from services.scheduler.domain.state.volatile import Presence
from services.scheduler.domain.suspensions import SuspensionStep, parked_bytes
from shared.contracts.loader import DeviceMemory, LoaderStatus
from shared.contracts.node import NodeStatus
from shared.contracts.plans import PlanRecord
from shared.telemetry.series import Counter, Histogram

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 15, 20, 30, 45, 60, 90, 120, 300)


_Record = Callable[[float, dict[str, str]], None]


class Metrics:
    """All metrics of a scheduler.

    Attributes:
        loaders: Returns the last status of every loader, while this scheduler leads.
        nodes: Returns the nodes with their last status, while this scheduler leads.
    """

    def __init__(self) -> None:
        self.loaders: Callable[[], Iterable[LoaderStatus]] = tuple
        self.nodes: Callable[[], Iterable[Presence]] = tuple
        self._registry = CollectorRegistry()
        present = PresentValues()
        self._registry.register(present)

        def seconds(name: str, text: str) -> _Record:
            histogram = Histogram(name, text, "seconds", SECONDS)
            self._registry.register(histogram)
            return histogram.record

        def count(name: str, text: str, unit: str = "") -> _Record:
            counter = Counter(name, text, unit)
            self._registry.register(counter)
            return counter.add

        self._predicted = seconds("thaw.plan.predicted", "From decision to ready, as predicted.")
        self._took = seconds("thaw.plan.took", "From decision to ready, as measured.")
        self._error = seconds("thaw.plan.error", "Absolute difference between the two.")
        self._bias = count("thaw.plan.late", "Time by which plans took longer than predicted.", "seconds")
        self._outcomes = count("thaw.plan.outcomes", "Finished plans, by outcome.")
        self._victims = count("thaw.plan.victims", "Instances that left for starts.")
        self._clearing = count("thaw.plan.clearing", "From decisions until their victims' memory was free.", "seconds")
        self._restarts = count("thaw.plan.restarts", "Starts that preemptions or migrations for others caused.", "seconds")
        self._phases = seconds("thaw.plan.phase", "Measured phases of plans.")
        self._suspensions = {
            "suspend": seconds("thaw.suspend", "Suspensions of engines, until their memory is given back."),
            "resume": seconds("thaw.resume", "Resumptions of suspended engines, until they answer."),
        }
        present.add_gauge(
            "thaw.suspended",
            self._snapshots_by_model,
            "bytes",
            "Suspended engines of a model on a node, by thaw.place: host, swap.",
        )
        present.add_gauge("thaw.device.memory", self._memory, "bytes", "Pages of a device, by state.")
        present.add_gauge(
            "thaw.device.violations", self._violations, "", "Of conservation of a device's pages; 0 in a correct node."
        )
        links = (
            ("queued", "queued_bytes", "bytes", "Bytes that loads wait for on a link of a node."),
            ("loads", "loads", "", "Loads that share a link of a node."),
            ("bandwidth", "bytes_per_second", "bytes_per_second", "Bandwidth of a link of a node, as its latest chunks show it."),
        )
        for name, attribute, unit, text in links:
            present.add_gauge(f"thaw.link.{name}", partial(self._links, attribute), unit, text)
        present.add_counter(
            "thaw.link.moved", partial(self._links, "moved_bytes"), "bytes", "Bytes that have crossed a link of a node."
        )
        for name, attribute, text in (
            ("copied", "copied_bytes", "Bytes of weights copied to a device with memory of its own."),
            ("reused", "reused_bytes", "Bytes of weights that such a device had already."),
        ):
            present.add_counter(f"thaw.device.{name}", partial(self._weights, attribute), "bytes", text)
        present.add_gauge("thaw.cache", self._caches, "bytes", "Weights that a node caches, by thaw.tier.")
        present.add_gauge("thaw.disk", self._disk, "bytes", "File system of a node's disk cache, by thaw.state: used, free.")
        present.add_gauge("thaw.swap", self._swap, "bytes", "Swap of a node, by thaw.state: used, free.")
        present.add_gauge("thaw.nodes", self._nodes, "", "Nodes, by thaw.state: alive or lost.")
        present.add_gauge("thaw.instances", self._instances, "", "Instances of living nodes, by state.")
        for name, text in (
            ("budget", "Memory of a device that instances may reserve."),
            ("reserved", "Reserved memory of a device."),
        ):
            present.add_gauge(f"thaw.device.{name}", partial(self._device, f"{name}_bytes"), "bytes", text)
        snapshots = (
            ("thaw.snapshots", "snapshot_bytes", "Snapshots of"),
            ("thaw.snapshots.budget", "snapshot_budget_bytes", "Budget for"),
        )
        for name, attribute, text in snapshots:
            present.add_gauge(name, partial(self._snapshots, attribute), "bytes", f"{text} suspended engines of a node.")

    def plan(self, plan: PlanRecord) -> None:
        """Record a plan that has ended."""
        chosen = plan.chosen
        names = {"gen_ai.request.model": plan.model, "thaw.trigger": plan.trigger}
        if chosen is not None:
            names |= {"thaw.way": chosen.ready_by, "thaw.clearing": chosen.clearing, "thaw.source": chosen.source}
        self._outcomes(1, {**names, "thaw.outcome": plan.outcome})
        if chosen is not None and chosen.cleared_ms is not None:
            self._victims(len(chosen.victims), names)
            self._clearing(chosen.cleared_ms / 1e3, names)
        if plan.caused_by is not None and plan.measured_ms is not None:
            self._restarts(plan.measured_ms / 1e3, names)
        if plan.outcome != "ready" or chosen is None:
            return
        for phase, ms in plan.measured_phases.items():
            self._phases(ms / 1e3, {**names, "thaw.phase": phase})
        if chosen.took_ms is None or chosen.predicted_ms is None or chosen.error_ms is None:
            return
        self._predicted(chosen.predicted_ms / 1e3, names)
        self._took(chosen.took_ms / 1e3, names)
        self._error(abs(chosen.error_ms) / 1e3, names)
        self._bias(max(0.0, chosen.error_ms) / 1e3, names)

    def suspension(self, step: SuspensionStep) -> None:
        """Record a suspension or resumption that is over."""
        names = {"gen_ai.request.model": step.model, "thaw.node": step.node, "thaw.way": step.way}
        self._suspensions[step.kind](step.took_ms / 1e3, names)

    def _snapshots_by_model(self) -> Iterator[Value]:
        for status in self._statuses():
            sums: Counts[tuple[str, str]] = Counts()
            for instance in status.instances:
                if instance.state.parked:
                    sums.update({(instance.model, place): nbytes for place, nbytes in parked_bytes(instance).items()})
            for (model, place), nbytes in sums.items():
                names = {"gen_ai.request.model": model, "thaw.node": status.node, "thaw.place": place}
                yield nbytes, names

    def _memory(self) -> Iterator[Value]:
        for names, m in self._by_device():
            states = {"free": m.free_bytes, "mapped": m.mapped_bytes, "reusable": m.reusable_bytes, "lent": m.lent_bytes}
            for state, nbytes in states.items():
                yield nbytes, {**names, "thaw.state": state}

    def _violations(self) -> Iterator[Value]:
        for names, m in self._by_device():
            yield len(m.violations), names

    def _links(self, attribute: str) -> Iterator[Value]:
        for status in self.loaders():
            for link in status.links:
                value = getattr(link, attribute)
                if value is not None:
                    paced = {"thaw.paced": "true"} if link.is_paced else {}
                    yield value, {"thaw.node": status.node, "thaw.link": link.link} | paced

    def _nodes(self) -> Iterator[Value]:
        nodes = tuple(self.nodes())
        for state, count in (("alive", sum(n.alive for n in nodes)), ("lost", sum(not n.alive for n in nodes))):
            if nodes:
                yield count, {"thaw.state": state}

    def _instances(self) -> Iterator[Value]:
        states = Counts(i.state.value for status in self._statuses() for i in status.instances)
        return ((count, {"thaw.state": state}) for state, count in states.items())

    def _device(self, attribute: str) -> Iterator[Value]:
        for status in self._statuses():
            for device in status.devices:
                yield getattr(device, attribute), {"thaw.node": status.node, "thaw.device": device.device_id}

    def _snapshots(self, attribute: str) -> Iterator[Value]:
        return ((getattr(status, attribute), {"thaw.node": status.node}) for status in self._statuses())

    def _weights(self, attribute: str) -> Iterator[Value]:
        return ((getattr(device, attribute), names) for names, device in self._by_device())

    def _caches(self) -> Iterator[Value]:
        for status in self.loaders():
            for tier, nbytes in (("dram", status.dram_bytes), ("ssd", status.ssd_bytes)):
                yield nbytes, {"thaw.node": status.node, "thaw.tier": tier}

    def _disk(self) -> Iterator[Value]:
        for status in self.loaders():
            if status.disk_bytes:
                yield from _used_and_free(status.node, status.disk_bytes, status.disk_free_bytes)

    def _swap(self) -> Iterator[Value]:
        for status in self._statuses():
            if status.swap is not None:
                yield from _used_and_free(status.node, status.swap.total_bytes, status.swap.free_bytes)

    def _statuses(self) -> list[NodeStatus]:
        return [n.status for n in self.nodes() if n.alive and n.status is not None]

    def _by_device(self) -> Iterator[tuple[dict[str, str], DeviceMemory]]:
        for status in self.loaders():
            for device in status.memory:
                yield {"thaw.node": status.node, "thaw.device": device.device_id}, device

    def render(self) -> bytes:
        text: bytes = generate_latest(self._registry)
        return text

    @contextlib.contextmanager
    def served(self, host: str, port: int) -> Iterator[int]:
        """Serve http://host:port/metrics and yield the port (0: a free one)."""
        server, thread = start_http_server(port, host, self._registry)
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _used_and_free(node: str, total: int, free: int) -> Iterator[Value]:
    for state, nbytes in (("used", total - free), ("free", free)):
        yield nbytes, {"thaw.node": node, "thaw.state": state}
