"""Decide which instances share a process."""

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

    1. The model requests it (`isolation: shared`).
    2. The model runs on the builtin engine, on one device, and has no code of its own.
    3. The model has crashed fewer than `MAX_CRASHES` executors.
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
    """Count an executor's crash for the model of `culprit`, the instance that was computing."""
    if instance.is_shared and instance.instance_id == culprit:
        key = _key(instance.command.card)
        crashes = transition.state.crashes
        transition.state = replace(transition.state, crashes={**crashes, key: crashes.get(key, 0) + 1})


def _key(card: ModelCard) -> str:
    return f"{card.name}@{card.info.revision}"
