"""The pages that the KV cache borrows. They belong to the computing thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.engine.domain.elastic_kv import Lease, adjust, lent, next_adjustment, shrink


class Lender(Protocol):
    """Where pages come from. Answers arrive as commands of the computing thread.

    - `demand`: ask for a number of pages in all.
    - `give_back`: return a number of pages, whose memory is free.
    """

    def demand(self, pages: int) -> None: ...
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

    def adjust(self, needed: int, used: int, now: float, *, is_stalled: bool) -> None:
        """Ask for more pages or return some (`domain.elastic_kv`)."""
        found = adjust(self.lease, needed, used, now, is_stalled=is_stalled)
        self.lease = found.lease
        if found.ask is not None:
            self.lender.demand(found.ask)
        if found.give_back:
            self.lender.give_back(found.give_back)

    def on_lent(self, more: int, *, is_answer: bool) -> None:
        self.lease = lent(self.lease, more, is_answer=is_answer)

    def shrink(self, keep: int) -> int:
        """Keep no more than `keep` pages; return the number to `release` when they are free."""
        before = self.lease.held
        self.lease = shrink(self.lease, keep)
        return before - self.lease.held

    def release(self, pages: int) -> None:
        if pages:
            self.lender.give_back(pages)

    def patience(self, now: float) -> float | None:
        """Return the seconds until `adjust` is due without an event."""
        due = next_adjustment(self.lease)
        return max(0.0, due - now) if due is not None else None
