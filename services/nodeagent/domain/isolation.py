"""Which instances share a process."""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain.state import Instance
from services.nodeagent.domain.transition import Transition
from shared.contracts.models import ModelCard
from shared.contracts.node import StartInstance

MAX_CRASHES = 2
"""A model that has crashed its executor this often gets a process of its own."""


def shares(transition: Transition, command: StartInstance) -> bool:
    """True if the instance is attached to its device's executor.

    1. The model asks for it (`isolation: shared`).
    2. It runs on the builtin engine, on one device, without code of its own.
    3. It has not crashed executors before.
    """
    spec = command.card.spec
    return (
        spec.isolation == "shared"
        and spec.engine == "builtin"
        and not spec.trust_remote_code
        and len(command.device_ids) == 1
        and transition.state.crashes.get(_key(command.card), 0) < MAX_CRASHES
    )


def count_crash(transition: Transition, instance: Instance, culprit: str) -> None:
    """Count the exit of an executor for the instance that was computing."""
    if instance.is_shared and instance.instance_id == culprit:
        key = _key(instance.command.card)
        crashes = transition.state.crashes
        transition.state = replace(transition.state, crashes={**crashes, key: crashes.get(key, 0) + 1})


def _key(card: ModelCard) -> str:
    return f"{card.name}@{card.info.revision}"
