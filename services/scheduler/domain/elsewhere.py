"""Where the requests of an instance that serves could go on, so that another model gets its room (migrate-then-load, ServerlessLLM §6.2)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from services.scheduler.domain.accounting import booking
from services.scheduler.domain.booking import Booking
from services.scheduler.domain.draft import Draft
from services.scheduler.domain.entities import Instance, Model
from services.scheduler.domain.estimates import Forecast
from services.scheduler.domain.holding import held_bytes
from services.scheduler.domain.learning_moves import resume_seconds
from services.scheduler.domain.needs import need_to_start
from services.scheduler.domain.policies.port import Move
from services.scheduler.domain.shortlist import shortlists
from shared.contracts.node import InstanceState

MOST = 4
"""Ways out that are told of one instance."""


def ways_out(d: Draft, i: Instance, owner: Model, here: Booking) -> tuple[Move, ...]:
    """1. To a ready instance of the same weights: nothing has to be loaded. 2. To devices that have room for one as they are."""
    if "migrate" not in d.policy.capabilities or "migrate" not in d.policy.profile.uses:
        return ()
    if not owner.card.capabilities.token_resume or i.generation != owner.card.generation:
        return ()
    if any(m.source == i.instance_id for m in d.state.moves.values()):
        return ()
    return tuple(islice(_ways(d, i, owner, here, resume_seconds(d.state, i)), MOST))


def _ways(d: Draft, i: Instance, owner: Model, here: Booking, resume_s: float) -> Iterator[Move]:
    for other in d.state.live(owner):
        if other.instance_id != i.instance_id and other.state is InstanceState.READY and len(other.device_ids) == 1:  # 1
            key = booking(d.state, other.node, other.device_ids[0]).key
            if key != here.key:
                yield Move(key, resume_s, held_bytes(d.state, i))
    need = need_to_start(d.state, owner.card)
    forecast = Forecast(d.state, owner.card, d.now)
    for devices in islice(shortlists(d, need, (), forecast), 1):  # 2
        for b in devices:
            if b.key != here.key and not b.closed and b.free >= need:
                yield Move(b.key, forecast.at(b, leaving=False).ms / 1e3 + resume_s, b.free)
