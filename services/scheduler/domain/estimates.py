"""How long a start will take, by phase: what was measured of the same model on the same node, else from its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.scheduler.domain.booking import Booking, booking
from services.scheduler.domain.entities import Instance
from services.scheduler.domain.heard import Estimate, estimate_key
from services.scheduler.domain.state import ClusterState
from shared.contracts.models import ModelCard
from shared.contracts.phases import NEW_ZYGOTE, Phase, PhaseSpan

WEIGHT_OF_NEWEST = 0.3
NODES_KEPT = 64
"""So many nodes' measurements of a model are kept, the first learned going first: a place in ten thousand models times a thousand nodes."""
DEFAULT_BYTES_PER_SECOND = 1e9
_PRIOR_MS = {"schedule": 10.0, "reserve": 5.0, "container": 50.0, "init": 500.0, "profile": 100.0}
DEFAULT_RESUME_MS = 300.0
LEAVING_MS = 500.0
"""Prior for the time a victim takes to leave."""
_FIRST = ("schedule", "reserve")
_BRINGING = ("fetch", "load")
_ENGINE = ("container", "context", "libraries")
_MODEL = ("init", "compile", "capture", "restore", "profile")
_NOTHING_TO_BRING = dict.fromkeys(_BRINGING, 0.0)
assert {*_FIRST, *_BRINGING, *_ENGINE, *_MODEL} <= set(Phase)


def resident(state: ClusterState, node: str, card: ModelCard) -> bool:
    """Whether the node's loader holds the weights of this revision, whole, in memory."""
    return node in state.resident_on.get(card.info.revision, ())


class Forecast:
    """How long a start of one model would take on each node, for many nodes: those that nothing tells apart share one reckoning."""

    def __init__(self, state: ClusterState, card: ModelCard) -> None:
        self._state = state
        self._card = card
        self.special = {*state.resident_on.get(card.info.revision, ()), *state.measured_on.get(card.name, ())}
        """Nodes that hold its weights, or have started it before."""
        self._found: dict[tuple[str, float | None, bool], tuple[dict[str, float], float]] = {}

    def on(self, b: Booking, *, leaving: bool) -> tuple[dict[str, float], float]:
        """Milliseconds by phase on a device's node, and in all. `leaving`: others must leave first."""
        return self._reckoned(b.node if b.node in self.special else "", b.bytes_per_second, leaving)

    def elsewhere(self, bytes_per_second: float | None) -> float:
        """Milliseconds in all, with nobody leaving, on nodes of that bandwidth which are not special: `total`, without its detail."""
        load = self._card.info.weights_bytes / (bytes_per_second or DEFAULT_BYTES_PER_SECOND) * 1e3
        return _BEFORE_MS + max(load, _ENGINE_MS) + _AFTER_MS

    def _reckoned(self, node: str, bytes_per_second: float | None, leaving: bool) -> tuple[dict[str, float], float]:
        key = (node, bytes_per_second, leaving)
        found = self._found.get(key)
        if found is None:
            phases = self._predict(*key)
            found = self._found[key] = (phases, total(phases))
        return found

    def restore(self, i: Instance, *, leaving: bool) -> tuple[dict[str, float], float]:
        """Milliseconds by phase until a suspended instance is back: as its node has measured it."""
        seen = self._state.seen.get(i.instance_id)
        known = seen.status.suspension.resume_ms if seen is not None else None
        phases = {k: _PRIOR_MS[k] for k in _FIRST} | {"restore": known if known is not None else DEFAULT_RESUME_MS}
        if leaving:
            phases["reserve"] += LEAVING_MS
        return phases, sum(phases.values())

    def _predict(self, node: str, bytes_per_second: float | None, leaving: bool) -> dict[str, float]:
        phases = dict(_PRIOR_MS)
        phases["load"] = self._card.info.weights_bytes / (bytes_per_second or DEFAULT_BYTES_PER_SECOND) * 1e3
        if measured := self._state.estimates.get(estimate_key(self._card.name, node)):
            phases |= measured.phases
        if resident(self._state, node, self._card):
            phases |= _NOTHING_TO_BRING
        if leaving:
            phases["reserve"] += LEAVING_MS
        return phases


def _of(phases: Mapping[str, float], names: Iterable[str]) -> float:
    return sum([phases.get(p, 0.0) for p in names])


_BEFORE_MS, _ENGINE_MS, _AFTER_MS = _of(_PRIOR_MS, _FIRST), _of(_PRIOR_MS, _ENGINE), _of(_PRIOR_MS, _MODEL)


def total(phases: Mapping[str, float]) -> float:
    """Milliseconds from demand to ready: weights arrive while the engine process is made, so only the longer of the two counts."""
    return _of(phases, _FIRST) + max(_of(phases, _BRINGING), _of(phases, _ENGINE)) + _of(phases, _MODEL)


def sooner_back(state: ClusterState, i: Instance) -> bool:
    """Whether a ready instance, suspended, would be back no later than a new one could be started where it is."""
    seen, model = state.seen.get(i.instance_id), state.models.get(i.model)
    resume_ms = seen.status.suspension.resume_ms if seen is not None else None
    if resume_ms is None or model is None:
        return True
    _, anew = Forecast(state, model.card).on(booking(state, i.node, i.device_ids[0]), leaving=False)
    return resume_ms <= anew


def learned(old: Estimate | None, model: str, node: str, measured: Iterable[PhaseSpan], was_resident: bool) -> Estimate:
    """`old` moved towards what a start measured. Waiting for victims, or for a zygote that was starting itself, and reading from memory say
    nothing of the next start."""
    sums: dict[str, float] = {}
    for span in measured:
        if span.phase in (Phase.QUEUE, Phase.MESH, Phase.RESERVE) or (was_resident and span.phase.value in _BRINGING):
            continue
        if span.phase is Phase.CONTAINER and span.detail.get("launcher") == NEW_ZYGOTE:
            continue
        sums[span.phase.value] = sums.get(span.phase.value, 0.0) + span.duration_ms
    known = dict(old.phases) if old else {}
    for phase, ms in sums.items():
        known[phase] = ms if phase not in known else known[phase] + WEIGHT_OF_NEWEST * (ms - known[phase])
    return Estimate(model, node, known)
