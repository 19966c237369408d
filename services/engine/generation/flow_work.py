"""The work of each key in one model: the input of `domain.step_order`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.engine.domain.fair_slots import Flow
from services.engine.generation.request import EmbedRequest, GenerationRequest
from services.engine.generation.sequences import Sequence, flow_of


@dataclass(frozen=True, slots=True)
class FlowWork:
    """The requests of one flow in one model.

    Attributes:
        weight: Share of the key relative to others.
        deadline: Time by which the most urgent one should have its first token, in monotonic
            seconds; None: none has an objective, or all are late.
    """

    weight: float = 1.0
    deadline: float | None = None


BACKGROUND = {Flow(): FlowWork()}
"""Work of no request, such as sequences that migrate to this engine."""


def list_flows(
    sequences: Iterable[Sequence], embeddings: Iterable[EmbedRequest], due: Mapping[str, float], now: float
) -> Mapping[Flow, FlowWork]:
    """Return the work of each flow.

    Args:
        sequences: Running and waiting sequences.
        embeddings: Waiting embedding requests.
        due: Time by which a request should have its first token, by id.
        now: Seconds of the monotonic clock.
    """
    found: dict[Flow, FlowWork] = {}
    wanted: list[tuple[Flow, GenerationRequest | EmbedRequest]] = [(s.flow, s.request) for s in sequences]
    wanted += [(flow_of(r.share), r) for r in embeddings]
    for flow, request in wanted:
        known, at = found.get(flow), due.get(request.request_id)
        if at is not None and at < now:
            at = None
        if known is None:
            found[flow] = FlowWork(request.share.weight, at)
        elif at is not None and (known.deadline is None or at < known.deadline):
            found[flow] = FlowWork(known.weight, at)
    return found or BACKGROUND
