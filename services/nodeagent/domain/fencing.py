"""Commands older than one already seen come from a leader that is no longer in charge; they are refused."""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain.events import PersistEpoch
from services.nodeagent.domain.state import EPOCH_SHIFT, Instance
from services.nodeagent.domain.transition import Turn
from shared.errors import StaleToken


def stale(turn: Turn, token: int, instance: Instance | None) -> StaleToken | None:
    """Why a command with `token` is too old for this node or this instance; None if it is not. Takes note of a newer epoch."""
    epoch = token >> EPOCH_SHIFT
    if epoch < turn.state.newest_epoch:
        return StaleToken(f"epoch {epoch} is over: this node has seen epoch {turn.state.newest_epoch}; a newer leader is in charge")
    if epoch > turn.state.newest_epoch:
        turn.state = replace(turn.state, newest_epoch=epoch)
        turn.emit(PersistEpoch(epoch))
    if instance is not None and token < instance.token:
        return StaleToken(f"token {token} is older than {instance.token}, already seen for instance {instance.instance_id}")
    return None
