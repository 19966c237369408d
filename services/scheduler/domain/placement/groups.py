"""The option of a group of stages on several nodes: HydraServe's pipeline.

Each stage fetches its part over the links of its own node, so that the parts arrive at the same
time (Eq. 1 of the paper: (M/s) · max(1/b + 1/p)). The group is granted all or nothing: only devices
that have room now are used, and nothing is cleared for a later stage.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter

from services.scheduler.domain.estimates.start_times import Forecast, Prediction
from services.scheduler.domain.placement.options import DeviceFit, FeasiblePlacement, open_for
from services.scheduler.domain.placement.request import PlacementRequest
from services.scheduler.domain.policies.port import NOTHING_TO_CLEAR, DeviceView, Option
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.models import ModelCard

_node = attrgetter("node")


def group_options(tx: Transaction, r: PlacementRequest) -> list[FeasiblePlacement]:
    """Return the option of placing the model's stages on several nodes, if there is one.

    1. The devices with room, on each node the soonest first. 2. One device of each node, the
    soonest nodes first; then a second one of each. 3. Stages of one node share its links: their
    parts arrive one after the other. The start takes as long as its slowest node.
    """
    stages = r.model.card.stages
    if not stages:
        return []
    part = Forecast(tx.state, card_of_parts(r.model.card, 1), tx.now)
    free: list[tuple[Booking, DeviceView]] = []
    for node in tx.state.nodes.values():
        for device in node.devices:
            b = tx.state.bookings.get(device_key(node.name, device.device_id))
            fit = open_for(tx, r, b) if b is not None else None
            if b is not None and isinstance(fit, DeviceFit) and fit.clearance is NOTHING_TO_CLEAR:
                free.append((b, fit.device))
    soonest = {b.key: (b.key in r.avoid, part.predict(b, leaving=False).ms, b.key) for b, _ in free}
    ranked = sorted(free, key=lambda found: (found[0].node, soonest[found[0].key]))  # 1
    rounds = [
        (place, soonest[b.key], b, view)
        for _, there in groupby(ranked, key=lambda found: found[0].node)
        for place, (b, view) in enumerate(there)
    ]
    chosen = sorted(rounds, key=lambda found: found[:2])[: len(stages)]  # 2
    devices = [b for _, _, b, _ in chosen]
    counts = {name: [b.node for b in devices].count(name) for name in map(_node, devices)}
    if len(devices) < len(stages) or len(counts) < 2:
        return []
    forecasts = {n: Forecast(tx.state, card_of_parts(r.model.card, n), tx.now) for n in set(counts.values())}
    predictions = [forecasts[counts[b.node]].predict(b, leaving=False) for b in devices]
    slowest: Prediction = max(predictions, key=lambda p: p.ms)  # 3
    option = Option(
        tuple(view for *_, view in chosen),
        "pipeline",
        slowest.cost,
        source=slowest.source,
        stages=len(stages),
        full_workers=0,
    )
    first, *later = devices
    placed = FeasiblePlacement(option, first.node, (first.device_id,), r.need_bytes, slowest)
    return [placed._replace(later=tuple(b.key for b in later))]


def card_of_parts(card: ModelCard, parts: int) -> ModelCard:
    """Return the card with the bytes of `parts` of its stages, as the largest of them has."""
    layers, stages = card.info.layers, card.stages
    if layers is None or not stages:
        return card
    largest = max(layers.bytes_of(s) for s in stages)
    weights = min(card.info.weights_bytes, parts * largest)
    return card.model_copy(update={"info": card.info.model_copy(update={"weights_bytes": weights})})
