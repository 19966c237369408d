"""The option of a group of stages on several nodes: HydraServe's pipeline.

Each stage fetches its part over the links of its own node, so that the parts arrive at the same
time (Eq. 1 of the paper: (M/s) · max(1/b + 1/p)). The group is granted all or nothing: its start
waits until the devices of all stages have the memory (stage_places.py).
"""

from __future__ import annotations

from heapq import nsmallest
from itertools import groupby
from operator import attrgetter

from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.placement.link_rule import link_rule
from services.scheduler.domain.placement.options import FeasiblePlacement, open_for
from services.scheduler.domain.placement.request import PlacementRequest
from services.scheduler.domain.placement.shortlist import SHORTLIST_SIZE
from services.scheduler.domain.placement.stage_places import clear_all, find_stage_places, place_group
from services.scheduler.domain.policies.port import NOTHING_TO_CLEAR
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.values import replace
from shared.contracts.models import ModelCard
from shared.contracts.plans import Candidate

_node = attrgetter("booking.node")


def group_options(tx: Transaction, r: PlacementRequest) -> list[Candidate | FeasiblePlacement]:
    """Return the option of placing the model's stages on several nodes, else the obstacles.

    1. The devices that a stage can have, the best first. 2. One device of each node, the best nodes
    first; then a second one of each. 3. Stages of one node share its links: their parts arrive one
    after the other. The start takes as long as its slowest node.
    """
    stages = r.model.card.stages
    if not stages:
        return []
    part = Forecast(tx.state, card_of_parts(r.model.card, 1), tx.now)
    r = replace(r, link=link_rule(tx, part) if r.link is not None else None)
    places = find_stage_places(tx, r, part)  # 1
    by_node = groupby(
        sorted(enumerate(places), key=lambda found: (found[1].booking.node, found[0])), key=lambda found: _node(found[1])
    )
    rounds = [(turn, best, place) for _, there in by_node for turn, (best, place) in enumerate(there)]
    chosen = [place for *_, place in sorted(rounds, key=lambda found: found[:2])[: len(stages)]]  # 2
    counts = {name: [_node(p) for p in chosen].count(name) for name in map(_node, chosen)}
    if len(chosen) < len(stages) or len(counts) < 2 or (clearance := clear_all(chosen)) is None:
        return _list_obstacles(tx, r)
    forecasts = {n: Forecast(tx.state, card_of_parts(r.model.card, n), tx.now) for n in set(counts.values())}
    leaving = clearance is not NOTHING_TO_CLEAR
    predictions = [forecasts[counts[_node(p)]].predict(p.booking, leaving=leaving) for p in chosen]
    return [place_group(chosen, clearance, max(predictions, key=lambda p: p.ms), r.need_bytes)]  # 3


def _list_obstacles(tx: Transaction, r: PlacementRequest) -> list[Candidate | FeasiblePlacement]:
    """Return why the devices with the most memory cannot have a stage."""
    most = nsmallest(SHORTLIST_SIZE, tx.state.bookings.values(), key=lambda b: (bool(b.closed_reason), -b.free_soon_bytes, b.key))
    return [found for b in most if isinstance(found := open_for(tx, r, b), Candidate)]


def card_of_parts(card: ModelCard, parts: int) -> ModelCard:
    """Return the card with the bytes of `parts` of its stages or ranks, each the largest one."""
    if not card.stages:
        return card
    if card.ranks and not card.spec.loads_itself:
        largest = max(card.info.part_bytes(None, rank) for rank in card.ranks)
    else:
        largest = max(card.info.part_bytes(s) for s in card.stages)
    weights = min(card.info.weights_bytes, parts * largest)
    return card.model_copy(update={"info": card.info.model_copy(update={"weights_bytes": weights})})
