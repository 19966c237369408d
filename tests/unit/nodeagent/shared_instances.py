"""Commands that start instances which share a process."""

from __future__ import annotations

from shared.contracts.models import ModelCard
from shared.contracts.node import StartInstance
from tests.unit.nodeagent.world import CARD, start


def shared(instance_id: str = "i", **spec: object) -> StartInstance:
    card = ModelCard(spec=CARD.spec.model_copy(update={"isolation": "shared", **spec}), info=CARD.info, created=0)
    return start(instance_id, reserve=10).model_copy(update={"card": card})
