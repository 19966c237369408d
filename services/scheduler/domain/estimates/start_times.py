"""Predicted start times by phase.

Parameters are those learned of the model on the node, else of the model on all nodes, else priors.
Loads are predicted as q + n/b: q is queued on the node's links, b is the learned bandwidth of this
model, device and tier, or the slowest link on the way as the loader measured it. `start_learning`
updates the parameters after a measured start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from services.scheduler.domain.cost.cost import Cost
from services.scheduler.domain.cost.formulas import (
    AFTER,
    BEFORE,
    BRINGING,
    ENGINE,
    critical_path,
    critical_phases,
    load_s,
    two_way_load_s,
)
from services.scheduler.domain.cost.learned import Parameter
from services.scheduler.domain.cost.links import DEFAULT_BYTES_PER_SECOND, find_bus, find_slowest, peer_rate
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.measurements import ANYWHERE, estimate_key
from services.scheduler.domain.state.shared_weights import bytes_on_peers, separate_memory, weights_there
from services.scheduler.domain.values import replace, value
from shared.contracts.loader import LoaderStatus, WeightsOnDevice
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase
from shared.template_key import template_key

NODES_KEPT = 64
"""Nodes with their own measurements of a model; the oldest is dropped beyond this.

This bounds the table for ten thousand models on a thousand nodes.
"""
PRIOR_MS = {"schedule": 10.0, "reserve": 5.0, "container": 50.0, "init": 500.0, "profile": 100.0}
DEFAULT_RESUME_MS = 300.0
LEAVING_MS = 500.0
"""Prior for the time until a victim's memory is free."""
LEAVING, RESUMING, REUSING, CHANGING = "leaving", "resuming", "reusing", "changing"
"""Quantities besides the phases: ms until victims are gone, until an instance has resumed, until
weights that are whole on a separate device are checked and mapped, and until a template's engine,
woken, serves another model.
"""
DEFAULT_CHANGE_MS = 500.0
DEFAULT_REUSE_MS = 20.0
TEMPLATE_PREFIX = "template:"
"""Begins the names under which estimates of template keys are stored."""
_NONE: Mapping[str, Parameter] = {}
_FIXED = frozenset({*BEFORE, *ENGINE, *AFTER})
_ATTACH = Phase.ATTACH.value
_PROCESS = frozenset(ENGINE) - {_ATTACH}
"""Phases of a process that starts: an engine, or the executor of a device."""


def bandwidth(tier: str, device_id: str = "") -> str:
    """Return the name of the bandwidth from a tier to all devices of a node, or to one device."""
    return f"bandwidth:{tier}@{device_id}" if device_id else f"bandwidth:{tier}"


def is_resident(state: ClusterState, node: str, card: ModelCard) -> bool:
    """True if the node's loader has all weights of this revision in memory."""
    return node in state.in_memory.get(card.info.revision, ())


@value(frozen=True, slots=True)
class Prediction:
    """A predicted start, in milliseconds.

    Attributes:
        phases: Milliseconds by phase.
        ms: In all.
        cost: The same for policies.
        source: The tier that its bytes come from.
        resident_bytes: Bytes that are on the device already.
        queued_ms: Part of the load that is queueing.
        read_bytes: Bytes that are read from the source; None: those that are not on the device.
        is_reuse: Only what the device lacks is copied to it.
        weights_bytes: Bytes of all the weights, where some are on the device; else 0.
        peers: Other devices of the node that bytes are copied from.
        peer_bytes: Bytes that are copied from them.
    """

    phases: dict[str, float]
    ms: float
    cost: Cost
    source: str = ""
    resident_bytes: int = 0
    queued_ms: float = 0.0
    read_bytes: int | None = None
    is_reuse: bool = False
    weights_bytes: int = 0
    peers: tuple[str, ...] = ()
    peer_bytes: int = 0


class _Loading(NamedTuple):
    """The load of the weights; its fields are those of `Prediction`."""

    source: str
    resident_bytes: int = 0
    queued_ms: float = 0.0
    read_bytes: int | None = None
    is_reuse: bool = False
    weights_bytes: int = 0
    peers: tuple[str, ...] = ()
    peer_bytes: int = 0


class Forecast:
    """Predicted start times of one model on many nodes; equal nodes share one result."""

    def __init__(self, state: ClusterState, card: ModelCard, now: float | None = None) -> None:
        """Create a forecast.

        Args:
            state: The cluster.
            card: The model.
            now: Queues on links count from then; None: queues do not count.
        """
        self._state, self.card, self._now = state, card, now
        self._loads_itself = card.spec.loads_itself
        self.is_remote = "://" in card.info.source
        """Nodes without its bytes load them over their links to remote sources."""
        self._anywhere = learned_values(state, card.name, ANYWHERE) or _of_its_key(state, card)
        self._is_shared = card.spec.isolation == "shared"
        self._learned = PRIOR_MS | _phases(self._anywhere) if self._anywhere else PRIOR_MS
        self._fixed = _of_one_start(self._learned, attaches=False)
        """Milliseconds of the phases that load no weights, on nodes without measurements."""
        self._before, self._engine, self._after = _parts(self._fixed) if self._anywhere else _PRIOR_PARTS
        own = self._anywhere.get("load") if self._loads_itself else None
        self._own_load = own.value if own is not None else None
        """Milliseconds that the engine itself takes to load."""
        self._found: dict[tuple[str, float | None, bool, bool], Prediction] = {}

    @cached_property
    def known_nodes(self) -> set[str]:
        """Return the nodes that have its weights, or have started it before."""
        state, revision = self._state, self.card.info.revision
        found = {*state.in_memory.get(revision, ()), *state.on_disk.get(revision, ())}
        found.update(state.has_units.get(revision, ()))
        found.update(state.measured_on.get(self.card.name, ()))
        return found

    def fetches(self, node: str) -> bool:
        """True if the node has no copy of the weights, and would fetch them from far."""
        return self._tier(node) == "remote"

    def has_queue(self, node: str) -> bool:
        """True if a load would wait for the node's links."""
        return self._now is not None and self._state.links_busy_until.get(node, 0.0) > self._now

    def predict_ms(self, b: Booking, *, leaving: bool) -> tuple[dict[str, float], float]:
        """Return milliseconds by phase on a device's node, and in all."""
        found = self.predict(b, leaving=leaving)
        return found.phases, found.ms

    def predict(self, b: Booking, *, leaving: bool) -> Prediction:
        """Return the prediction for a device.

        Args:
            leaving: Victims must leave first.
        """
        special = b.node in self.known_nodes or (
            self._now is not None and self._state.links_busy_until.get(b.node, 0.0) > self._now
        )
        speed = (b.remote_bytes_per_second or b.bytes_per_second) if self.is_remote else b.bytes_per_second
        attaches = self._is_shared and b.executor_bytes > 0
        key = (b.key if special else "", speed, leaving, attaches)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._compute_prediction(b if special else None, speed, leaving, attaches)
        return found

    def predict_set(self, devices: Sequence[Booking], *, leaving: bool) -> Prediction:
        """Return the prediction for devices of one node that load their parts at the same time.

        1. A measured bandwidth is that of all parts together. 2. Else the link from the source
        passes all bytes, and each device's own link its part. The slowest counts (ServerlessLLM
        4.2).
        """
        first, found = devices[0], self.predict(devices[0], leaving=leaving)
        loader = self._state.loaders.get(first.node)
        if len(devices) == 1 or self._loads_itself or loader is None:
            return found
        tier, own = self._tier(first.node), learned_values(self._state, self.card.name, first.node)
        if own.get(bandwidth(tier, first.device_id)) or own.get(bandwidth(tier)):  # 1
            return found
        status, parts = loader.status, parts_of(self.card, len(devices))
        buses = [find_bus(b.device_id, status) for b in devices]
        copying = max(load_s(nbytes, bus) if bus else 0.0 for nbytes, bus in zip(parts, buses, strict=True))
        reading = 0.0
        if tier != "dram":
            speed = find_slowest(tier, "", status) or first.bytes_per_second or DEFAULT_BYTES_PER_SECOND
            reading = load_s(self.card.info.weights_bytes, speed, found.queued_ms / 1e3)
        load_ms = max(reading, copying) * 1e3  # 2
        phases = {**found.phases, "load": load_ms, **({"fetch": load_ms} if tier == "remote" else {})}
        ms = critical_path(phases)
        return replace(found, phases=phases, ms=ms, cost=_cost(phases, ms, found.cost.spread_s * 1e3))

    def default_ms(self, bytes_per_second: float | None) -> float:
        """Return the milliseconds on an idle node of that bandwidth that is not a known node."""
        return self._before + max(self._load_ms(bytes_per_second), self._engine) + self._after

    def _load_ms(self, bytes_per_second: float | None) -> float:
        if self._own_load is not None:
            return self._own_load
        return load_s(self.card.info.weights_bytes, bytes_per_second or DEFAULT_BYTES_PER_SECOND) * 1e3

    def predict_resume(self, i: Instance, *, leaving: bool) -> Prediction:
        """Return the prediction for resuming a suspended instance, as its node measured it."""
        report = self._state.reports.get(i.instance_id)
        known = report.status.suspension.resume_ms if report is not None else None
        phases = {k: PRIOR_MS[k] for k in BEFORE} | {"restore": known if known is not None else DEFAULT_RESUME_MS}
        spread = 0.0
        if (learned := learned_values(self._state, i.model, i.node).get(RESUMING)) is not None:
            spread = learned.error
        if leaving:
            phases["reserve"] += self._leaving_ms(i.node)
        ms = sum(phases.values())
        return Prediction(phases, ms, _cost(phases, ms, spread))

    def predict_template(self, i: Instance, *, leaving: bool) -> Prediction:
        """Return the prediction for taking the engine of the suspended instance `i`.

        Waking it takes as long as its resume; the change is learned by node, of all models.
        """
        report = self._state.reports.get(i.instance_id)
        known = report.status.suspension.resume_ms if report is not None else None
        phases = {k: PRIOR_MS[k] for k in BEFORE} | {"restore": known if known is not None else DEFAULT_RESUME_MS}
        learned = learned_values(self._state, "", i.node).get(CHANGING) or learned_values(self._state, "", ANYWHERE).get(CHANGING)
        phases["load"] = learned.value if learned is not None else DEFAULT_CHANGE_MS
        if leaving:
            phases["reserve"] += self._leaving_ms(i.node)
        ms = sum(phases.values())
        return Prediction(phases, ms, _cost(phases, ms, learned.error if learned is not None else 0.0), "template")

    def _leaving_ms(self, node: str) -> float:
        known = learned_values(self._state, "", node).get(LEAVING) or learned_values(self._state, "", ANYWHERE).get(LEAVING)
        return known.value if known is not None else LEAVING_MS

    def _compute_prediction(self, b: Booking | None, bytes_per_second: float | None, leaving: bool, attaches: bool) -> Prediction:
        """Predict for a device `b` of a known node; None: for any other of that bandwidth.

        Args:
            attaches: The device's executor runs.
        """
        if b is None and not leaving and not self._anywhere:
            return _prior(self._load_ms(bytes_per_second), self._afar)
        phases, own = dict(self._learned), _NONE
        if b is not None:
            own = learned_values(self._state, self.card.name, b.node)
            phases |= _phases(own)
        phases = _of_one_start(phases, attaches)
        loading = self._bring(phases, b, own, bytes_per_second)
        if leaving:
            phases["reserve"] += self._leaving_ms(b.node if b is not None else ANYWHERE)
        ms = critical_path(phases)
        device_id = b.device_id if b is not None else ""
        errors = [self._error(own, p, loading.source, device_id) for p in critical_phases(phases)]
        return Prediction(phases, ms, _cost(phases, ms, sum(errors)), *loading)

    def _bring(
        self, phases: dict[str, float], b: Booking | None, own: Mapping[str, Parameter], bytes_per_second: float | None
    ) -> _Loading:
        """Add the phases that load the weights."""
        info = self.card.info
        if b is None:
            phases["load"] = self._load_ms(bytes_per_second)
            if self._afar == "remote":
                phases["fetch"] = phases["load"]
            return _Loading(self._afar)
        if self._loads_itself:
            known = own.get("load")
            phases["load"] = known.value if known is not None else self._load_ms(bytes_per_second)
            return _Loading("")
        tier = self._tier(b.node)
        loader = self._state.loaders.get(b.node)
        status = loader.status if loader is not None else None
        queued = max(0.0, self._state.links_busy_until.get(b.node, 0.0) - self._now) if self._now is not None else 0.0
        memory = separate_memory(status, b.device_id)
        if memory is not None and self.card.spec.engine == "builtin":
            units = weights_there(memory, info.revision)
            peers = bytes_on_peers(status, memory, info.revision) if status is not None else {}
            return self._bring_units(phases, b, own, status, tier, units, queued, peers)
        known = own.get(bandwidth(tier, b.device_id)) or own.get(bandwidth(tier))
        speed = known.value if known is not None else find_slowest(tier, b.device_id, status)
        there = on_device(status, info.revision, b.device_id)
        missing = max(0, info.weights_bytes - there)
        if tier == "dram":
            # weights are mapped from the host's own memory
            missing = 0 if speed is None or b.device_id.startswith("cpu") else missing
            phases["fetch"], phases["load"] = 0.0, load_s(missing, speed or DEFAULT_BYTES_PER_SECOND) * 1e3
            return _Loading(tier, info.weights_bytes - missing)
        phases["load"] = load_s(missing, speed or bytes_per_second or DEFAULT_BYTES_PER_SECOND, queued) * 1e3
        if tier == "remote":
            phases["fetch"] = phases["load"]  # pipelined: both last as long as the slower
        return _Loading(tier, there, queued * 1e3, is_reuse=there > 0)

    def _bring_units(
        self,
        phases: dict[str, float],
        b: Booking,
        own: Mapping[str, Parameter],
        status: LoaderStatus | None,
        tier: str,
        there: WeightsOnDevice | None,
        queued: float,
        peers: Mapping[str, int],
    ) -> _Loading:
        """Add the phases of a load to a separate device: (S - S')/B (Tangram 4.4).

        Missing bytes are copied to the device while the loader reads from the source, so that the
        slower of both counts. What other devices have (`peers`) is copied from there at the same
        time (Torpor 4.3).
        """
        whole = self.card.info.weights_bytes
        missing = min(whole, there.missing_bytes) if there is not None else whole
        read = 0 if tier == "dram" else there.read_bytes if there is not None else whole
        copied = own.get(bandwidth("dram", b.device_id))
        bus = copied.value if copied is not None else find_slowest("dram", b.device_id, status)
        known = own.get(bandwidth(tier, b.device_id)) or own.get(bandwidth(tier))
        source = known.value if known is not None else find_slowest(tier, "", status) or b.bytes_per_second
        fixed = own.get(REUSING)
        seconds = load_s(missing, bus or DEFAULT_BYTES_PER_SECOND)
        if read:
            seconds = max(seconds, load_s(read, source or DEFAULT_BYTES_PER_SECOND, queued))
        from_peers = 0
        if not missing:  # another load there brings what peers have
            peers = {}
        if peers:
            host = min(bus or DEFAULT_BYTES_PER_SECOND, (source or DEFAULT_BYTES_PER_SECOND) if read else math.inf)
            there_bytes = min(missing, sum(peers.values()))
            rate = there_bytes / sum(n / peer_rate(status, peer, b.device_id) for peer, n in peers.items())
            seconds, copied_bytes = two_way_load_s(missing, host, there_bytes, rate, queued if read else 0.0)
            from_peers = round(copied_bytes)
            read = max(0, read - from_peers)
        phases["load"] = (fixed.value if fixed is not None else DEFAULT_REUSE_MS) + seconds * 1e3
        phases["fetch"] = phases["load"] if tier == "remote" and read else 0.0
        queued_ms = queued * 1e3 if read else 0.0
        return _Loading(tier, whole - missing, queued_ms, read, missing < whole, whole, tuple(peers), from_peers)

    @property
    def _afar(self) -> str:
        """Return the source on a node without its bytes; empty: the engine loads by itself."""
        if self._loads_itself:
            return ""
        return "remote" if self.is_remote else "ssd"

    def _tier(self, node: str) -> str:
        if is_resident(self._state, node, self.card):
            return "dram"
        return "ssd" if node in self._state.on_disk.get(self.card.info.revision, ()) else self._afar

    def _error(self, own: Mapping[str, Parameter], phase: str, source: str, device_id: str) -> float:
        """Return the usual error of a phase's prediction in milliseconds; 0: unknown."""
        if phase in BRINGING and source:
            known = own.get(bandwidth(source, device_id)) or own.get(bandwidth(source))
            return known.error / known.value * load_s(self.card.info.weights_bytes, known.value) * 1e3 if known is not None else 0.0
        known = own.get(phase) or self._anywhere.get(phase)
        return known.error if known is not None else 0.0


def _of_one_start(phases: Mapping[str, float], attaches: bool) -> dict[str, float]:
    """Return the phases of a start: it starts a process, or is attached to a running executor.

    A model may have been started in both ways. Without a measured attach the process counts.
    """
    others = _PROCESS if attaches and _ATTACH in phases else {_ATTACH}
    return {k: v for k, v in phases.items() if k not in others}


def _parts(phases: Mapping[str, float]) -> tuple[float, float, float]:
    before, engine, after = (sum([phases.get(p, 0.0) for p in part]) for part in (BEFORE, ENGINE, AFTER))
    return before, engine, after


_PRIOR_PARTS = _parts(PRIOR_MS)


@lru_cache(maxsize=4096)
def _prior(load_ms: float, source: str) -> Prediction:
    """Return the prediction for an unmeasured model on an ordinary node; its error is 0."""
    phases = {**PRIOR_MS, "load": load_ms, **({"fetch": load_ms} if source == "remote" else {})}
    before, engine, after = _PRIOR_PARTS
    ms = before + max(load_ms, engine) + after
    return Prediction(phases, ms, _cost(phases, ms, 0.0), source)


def _of_its_key(state: ClusterState, card: ModelCard) -> Mapping[str, Parameter]:
    """Return what was learned of cold starts of models with the same template key.

    A model that has never run would otherwise be predicted to start as the built-in engine does.
    """
    return learned_values(state, name_of_key(key), ANYWHERE) if (key := template_key(card)) else _NONE


def name_of_key(key: str) -> str:
    """Return the name under which estimates of a template key are stored."""
    return f"{TEMPLATE_PREFIX}{key}"


def learned_values(state: ClusterState, model: str, node: str) -> Mapping[str, Parameter]:
    """Return the learned quantities of a model (empty: of all models) on a node, or anywhere."""
    found = state.estimates.get(estimate_key(model, node))
    return found.parameters if found is not None else _NONE


def _phases(parameters: Mapping[str, Parameter]) -> dict[str, float]:
    """Return the milliseconds of those phases that load no weights."""
    return {k: p.value for k, p in parameters.items() if k in _FIXED}


def parts_of(card: ModelCard, devices: int) -> list[int]:
    """Return the bytes of each of an instance's devices: of its stage, or an equal share."""
    if len(card.pipeline) == devices:
        return [card.info.part_bytes(layers) for layers in card.pipeline]
    return [-(-card.info.weights_bytes // devices)] * devices


def on_device(status: LoaderStatus | None, revision: str, device_id: str) -> int:
    """Return the bytes of a revision that the loader has on a device."""
    segments = status.segments if status is not None else ()
    return max([s.on_devices.get(device_id, 0) for s in segments if s.weights_id == revision], default=0)


def _cost(phases: Mapping[str, float], ms: float, spread_ms: float) -> Cost:
    return Cost(ms / 1e3, {k: v / 1e3 for k, v in phases.items()}, spread_ms / 1e3)


def restart_s(state: ClusterState, card: ModelCard, b: Booking) -> float:
    """Return the seconds to start a model on a free device over idle links."""
    revision = card.info.revision
    tables = (state.in_memory, state.on_disk, state.has_units)
    known = (state.measured_on.get(card.name), *(table.get(revision) for table in tables))
    if not any(known):  # the same as a `Forecast`, without creating one
        speed = (b.remote_bytes_per_second or b.bytes_per_second) if "://" in card.info.source else b.bytes_per_second
        load = load_s(card.info.weights_bytes, speed or DEFAULT_BYTES_PER_SECOND) * 1e3
        before, engine, after = _PRIOR_PARTS
        return (before + max(load, engine) + after) / 1e3
    return Forecast(state, card).predict(b, leaving=False).ms / 1e3


def least_start_s(state: ClusterState, model: Model) -> float:
    """Return the seconds that a start takes at least: the measured phases without the load.

    0 if nothing was measured, or if a suspended engine makes it quicker.
    """
    card = model.card
    if state.suspended_instances(model) or (state.by_template and state.by_template.get(template_key(card))):
        return 0.0
    learned = learned_values(state, card.name, ANYWHERE) or _of_its_key(state, card)
    return sum(_parts(_of_one_start(_phases(learned), card.spec.isolation == "shared"))) / 1e3


def resumes_faster(state: ClusterState, i: Instance) -> bool:
    """True if resuming the instance takes no longer than starting a new one in its place."""
    report, model = state.reports.get(i.instance_id), state.models.get(i.model)
    resume_ms = report.status.suspension.resume_ms if report is not None else None
    if resume_ms is None or model is None:
        return True
    _, restart_ms = Forecast(state, model.card).predict_ms(booking_of(state, i.node, i.device_ids[0]), leaving=False)
    return resume_ms <= restart_ms
