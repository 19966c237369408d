"""The pages that the KV cache borrows. They belong to the computing thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.engine.domain.elastic_kv import Demand, Lease, Need, add_lent, adjust, next_adjustment, shrink


class Lender(Protocol):
    """The source of pages. Its replies arrive as commands of the computing thread.

    - `demand`: ask for a number of pages in all, and for a turn.
    - `give_back`: return a number of pages, whose memory is free.
    """

    def demand(self, pages: int, turn: int = 0, turn_pages: int = 0) -> None: ...
    def give_back(self, pages: int) -> None: ...


@dataclass
class KvPages:
    """The lease of this engine, and its lender.

    Attributes:
        ceiling_blocks: Blocks of the whole KV cache, with what LoRA adapters take of it.
    """

    lease: Lease
    lender: Lender
    ceiling_blocks: int

    def blocks(self, granted: int) -> int:
        """Return the blocks that sequences may use.

        Args:
            granted: Blocks of the whole cache that LoRA adapters leave.
        """
        return max(0, min(granted, self.lease.blocks - (self.ceiling_blocks - granted)))

    def guaranteed_blocks(self, granted: int) -> int:
        """Return the blocks of these that no other process can ask for."""
        return max(0, self.lease.floor_blocks - (self.ceiling_blocks - granted))

    @property
    def demand_pages(self) -> int:
        """Return the pages that the engine wants to have."""
        return self.lease.asked.pages

    def adjust(self, need: Need, now: float) -> None:
        """Ask for more pages or return some (`domain.elastic_kv`)."""
        found = adjust(self.lease, need, now)
        self.lease = found.lease
        if found.ask is not None:
            self._ask(found.ask)
        if found.give_back:
            self.lender.give_back(found.give_back)

    def on_lent(self, more: int, *, is_answer: bool, turn: int | None) -> None:
        self.lease = add_lent(self.lease, more, is_answer=is_answer, turn=turn)

    def shrink(self, keep: int) -> int:
        """Keep no more than `keep` pages; return the number to `release` when they are free."""
        before = self.lease.held
        self.lease = shrink(self.lease, keep)
        return before - self.lease.held

    def release(self, pages: int) -> None:
        if pages:
            self.lender.give_back(pages)

    def _ask(self, demand: Demand) -> None:
        self.lender.demand(demand.pages, demand.turn, demand.turn_pages)

    def patience(self, now: float) -> float | None:
        """Return the seconds until `adjust` is due without an event."""
        due = next_adjustment(self.lease)
        return max(0.0, due - now) if due is not None else None
