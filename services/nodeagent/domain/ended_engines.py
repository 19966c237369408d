"""Engines that ended lately, with their last meters.

A stopped instance leaves the status after some seconds, and one that is started again has another
process. A scheduler that was not connected then asks for the meters of the ended process
(docs/adr/0101). Pure.
"""

from __future__ import annotations

from services.nodeagent.domain.state import Ended, Instance
from shared.contracts.node import EndedEngine

SHOWN_S = 4.0
"""Seconds that every whole status lists an ended engine: several do, in case one is lost."""
KEPT_S = 600.0
"""Seconds that ended engines are kept: long enough for a scheduler to be started again."""
KEPT = 256
"""Maximum number of ended engines, so that a status stays small."""


def add_ended(known: tuple[Ended, ...], instance: Instance, now: float) -> tuple[Ended, ...]:
    """Return the ended engines with that of `instance`, whose load has its last meters.

    Later stages of a group are left out: the first one has the meters of all.
    """
    command, load, stage = instance.command, instance.load, instance.command.stage
    is_later_stage = stage is not None and bool(stage.first) and stage.index > 0
    if instance.pid is None or is_later_stage or not command.device_ids or not (load.charged_s or load.background):
        return known
    engine = EndedEngine(
        instance_id=instance.instance_id,
        pid=instance.pid,
        model=command.card.name,
        device_kind=command.device_ids[0].partition(":")[0],
        device_count=stage.count if stage is not None and stage.first else len(command.device_ids),
        charged_s=load.charged_s,
        background=load.background,
    )
    return (*list_ended(known, now), Ended(now, engine))[-KEPT:]


def list_ended(known: tuple[Ended, ...], now: float, within_s: float = KEPT_S) -> tuple[Ended, ...]:
    """Return those that ended in the last `within_s`."""
    return tuple(e for e in known if e.at > now - within_s)
