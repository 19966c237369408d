"""How long a start will take, by phase: what was measured of the same model on the same node, else from its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.scheduler.domain.entities import Estimate
from services.scheduler.domain.state import ClusterState
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase, PhaseSpan

WEIGHT_OF_NEWEST = 0.3
DEFAULT_BYTES_PER_SECOND = 1e9
PRIOR_MS = {Phase.SCHEDULE: 10.0, Phase.RESERVE: 5.0, Phase.CONTAINER: 50.0, Phase.INIT: 500.0, Phase.PROFILE: 100.0}
LEAVING_MS = 500.0
"""Prior for the time a victim takes to leave."""
_BRINGING = (Phase.FETCH, Phase.LOAD)
_ENGINE = (Phase.CONTAINER, Phase.CONTEXT, Phase.LIBRARIES)
_MODEL = (Phase.INIT, Phase.COMPILE, Phase.CAPTURE, Phase.RESTORE, Phase.PROFILE)


def resident(state: ClusterState, node: str, card: ModelCard) -> bool:
    """Whether the node's loader holds the weights of this revision, whole, in memory."""
    return node in state.resident_on.get(card.info.revision, ())


def predict(state: ClusterState, node: str, card: ModelCard, leaving: bool) -> dict[str, float]:
    """Milliseconds by phase of a start on `node`."""
    loader = state.loaders.get(node)
    speed = (loader.status.bytes_per_second if loader else None) or DEFAULT_BYTES_PER_SECOND
    phases = {p.value: ms for p, ms in PRIOR_MS.items()}
    phases[Phase.LOAD.value] = card.info.weights_bytes / speed * 1e3
    if measured := state.estimates.get(Estimate(card.name, node).key):
        phases |= measured.phases
    if resident(state, node, card):
        phases |= {p.value: 0.0 for p in _BRINGING}
    if leaving:
        phases[Phase.RESERVE.value] += LEAVING_MS
    return phases


def total(phases: Mapping[str, float]) -> float:
    """Milliseconds from demand to ready: weights arrive while the engine process is made, so only the longer of the two counts."""

    def of(names: Iterable[Phase]) -> float:
        return sum(phases.get(p.value, 0.0) for p in names)

    return of((Phase.SCHEDULE, Phase.RESERVE)) + max(of(_BRINGING), of(_ENGINE)) + of(_MODEL)


def learned(old: Estimate | None, model: str, node: str, measured: Iterable[PhaseSpan], was_resident: bool) -> Estimate:
    """`old` moved towards what a start measured. Waiting for victims and reading from memory say nothing of the next start."""
    sums: dict[str, float] = {}
    for span in measured:
        if span.phase in (Phase.QUEUE, Phase.MESH, Phase.RESERVE) or (was_resident and span.phase in _BRINGING):
            continue
        sums[span.phase.value] = sums.get(span.phase.value, 0.0) + span.duration_ms
    known = dict(old.phases) if old else {}
    for phase, ms in sums.items():
        known[phase] = ms if phase not in known else known[phase] + WEIGHT_OF_NEWEST * (ms - known[phase])
    return Estimate(model, node, known)
