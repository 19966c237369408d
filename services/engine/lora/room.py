"""The memory that LoRA adapters and the KV cache of an engine share."""

from __future__ import annotations

from collections.abc import Callable

from services.engine.domain.step_planning import LoraBudget
from shared.contracts.models import ModelCard
from shared.errors import InsufficientMemory


class LoraRoom:
    """The `AdapterRoom` of the builtin engine, in bytes.

    Adapters take memory from the KV cache (`domain/step_planning.py`).

    Args:
        memory: The share of adapters in the instance's memory.
        grant: Sets the number of blocks that the KV cache may use.
    """

    def __init__(self, memory: LoraBudget, grant: Callable[[int], None]) -> None:
        self._memory, self._grant = memory, grant

    @property
    def budget(self) -> int:
        return self._memory.budget

    def size_of(self, card: ModelCard) -> int:
        return card.info.weights_bytes

    def on_used(self, used: int) -> None:
        self._grant(self._memory.kv_blocks(used))

    def refuse(self, card: ModelCard) -> InsufficientMemory:
        nbytes, base = card.info.weights_bytes, card.spec.base
        return InsufficientMemory(
            f"The adapter {card.name} has {nbytes} bytes, and an instance of {base} has {self.budget} for adapters. Set "
            f"engine_args.adapter_cache_bytes of {base} to {nbytes} or more"
        )
