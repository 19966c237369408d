"""The pages that the KV cache borrows. They belong to the computing thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.engine.domain.elastic_kv import Demand, Lease, Need, add_lent, adjust, next_adjustment, shrink


class Lender(Protocol):
    """The source of pages. Its replies arrive as commands of the computing thread."""

    def demand(self, pages: int, turn: int = 0, turn_pages: int = 0) -> None:
        """Ask for a number of pages in all, and for a turn."""
        ...

    def give_back(self, pages: int) -> None:
        """Return a number of pages, whose memory is free."""
        ...


class PageMemory(Protocol):
    """Memory that the engine has for each lent page, on a GPU."""

    def remove(self, pages: int) -> None:
        """Release the memory of pages that are about to be returned."""
        ...

    def keep_for_others(self, pages: int) -> None:
        """Leave so many of the pages without memory, because LoRA adapters use theirs."""
        ...


@dataclass
class KvPages:
    """The lease of this engine, and its lender.

    Attributes:
        ceiling_blocks: Blocks of the whole KV cache, with what LoRA adapters take of it.
        memory: Memory of the pages; None: sequences allocate and free it.
    """

    lease: Lease
    lender: Lender
    ceiling_blocks: int
    memory: PageMemory | None = None

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
        self.release(found.give_back)

    def on_lent(self, more: int, *, is_answer: bool, turn: int | None) -> None:
        self.lease = add_lent(self.lease, more, is_answer=is_answer, turn=turn)

    def shrink(self, keep: int) -> int:
        """Keep no more than `keep` pages; return the number to `release` when they are free."""
        before = self.lease.held
        self.lease = shrink(self.lease, keep)
        return before - self.lease.held

    def release(self, pages: int) -> None:
        if pages:
            if self.memory is not None:
                self.memory.remove(pages)
            self.lender.give_back(pages)

    def keep_for_others(self, granted: int) -> None:
        """Have no memory for what LoRA adapters take of the cache.

        Args:
            granted: Blocks of the whole cache that they leave.
        """
        if self.memory is not None:
            self.memory.keep_for_others(self.lease.pages_for(self.ceiling_blocks - granted))

    def _ask(self, demand: Demand) -> None:
        self.lender.demand(demand.pages, demand.turn, demand.turn_pages)

    def patience(self, now: float) -> float | None:
        """Return the seconds until `adjust` is due without an event."""
        due = next_adjustment(self.lease)
        return max(0.0, due - now) if due is not None else None
