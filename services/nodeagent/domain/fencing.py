"""Fencing: commands of a deposed leader, older than one already seen, are refused."""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain.events import PersistEpoch
from services.nodeagent.domain.state import EPOCH_SHIFT, Instance
from services.nodeagent.domain.transition import Transition
from shared.errors import StaleToken


def check_stale(transition: Transition, token: int, instance: Instance | None) -> StaleToken | None:
    """The reason why a command with `token` is stale for this node or instance.

    None if it is not. Records a newer epoch.
    """
    epoch = token >> EPOCH_SHIFT
    if epoch < transition.state.newest_epoch:
        return StaleToken(f"Epoch {epoch} is stale: this node has seen epoch {transition.state.newest_epoch} of a newer leader")
    if epoch > transition.state.newest_epoch:
        transition.state = replace(transition.state, newest_epoch=epoch)
        transition.emit(PersistEpoch(epoch))
    if instance is not None and token < instance.token:
        return StaleToken(f"Token {token} is older than {instance.token}, already seen for instance {instance.instance_id}")
    return None
