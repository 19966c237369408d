"""The blocks of the KV cache that the sequences of a batcher may use.

The whole cache, without what LoRA adapters take of it; or, if the cache borrows its memory, the
part of it that the lent pages hold. It belongs to the computing thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.engine.domain.elastic_kv import Need, needed_blocks
from services.engine.domain.step_planning import Limits, SequenceView, blocks_for
from services.engine.generation.kv_pages import KvPages


class KvBudget:
    """The limits of a batcher, which change with the blocks that it may use.

    Attributes:
        limits: The present limits.
        pages_wanted: Pages that the cache wants to have; 0 if it borrows none.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pages_wanted = 0
        self._granted = limits.kv_blocks
        self._pages: KvPages | None = None

    @property
    def borrows(self) -> bool:
        """True if the memory of the cache consists of lent pages."""
        return self._pages is not None

    def borrow(self, pages: KvPages) -> None:
        """Take the memory of the cache from `pages`."""
        self._pages = pages
        self._apply()

    def grant(self, kv_blocks: int) -> None:
        """Set the blocks of the whole cache that LoRA adapters leave."""
        self._granted = kv_blocks
        self._apply()

    def on_lent(self, more: int, *, is_answer: bool, turn: int | None) -> None:
        """Add pages that were lent."""
        if self._pages is not None:
            self._pages.on_lent(more, is_answer=is_answer, turn=turn)
            self._apply()

    def find_protected(self, oldest: SequenceView | None) -> int | None:
        """Return the key of the sequence that is not preempted.

        Args:
            oldest: The oldest sequence, running or waiting; protected unless the cache borrows.
        """
        if self._pages is not None:
            return self._pages.lease.protected
        return oldest.key if oldest is not None else None

    @property
    def turn(self) -> int | None:
        """Key of the sequence that has, or has asked for, the turn."""
        turn = self._pages.lease.turn if self._pages is not None else None
        return turn.key if turn is not None else None

    def awaits_pages(self, computed: Iterable[int]) -> bool:
        """Return whether the next step needs pages that the loader may be about to lend.

        Args:
            computed: Computed tokens of each running sequence.
        """
        if self._pages is None or self._pages.lease.is_answered:
            return False
        return sum(blocks_for(count + 1) for count in computed) > self.limits.kv_blocks

    def next_adjustment(self, now: float) -> float | None:
        """Return when `adjust` is due without an event; None: never."""
        if self._pages is None or (patience := self._pages.patience(now)) is None:
            return None
        return now + patience

    def adjust(
        self,
        running: Iterable[SequenceView],
        waiting: Iterable[SequenceView],
        oldest: SequenceView | None,
        *,
        used_blocks: int,
        promised_blocks: int,
        is_stalled: bool,
        now: float,
    ) -> None:
        """Ask for more pages, or return some, if the cache borrows.

        Args:
            running: Running sequences.
            waiting: Waiting sequences, first in line first.
            oldest: The oldest of all.
            used_blocks: Blocks in use.
            promised_blocks: Blocks that prepared prefixes will need.
            is_stalled: True if there are sequences and none can run.
            now: Monotonic seconds.
        """
        if self._pages is None:
            return
        other = self._pages.ceiling_blocks - self._granted
        needed = needed_blocks(running, waiting, self.limits) + promised_blocks + other
        self._pages.adjust(Need(needed, used_blocks, other, oldest, is_stalled), now)
        self._apply()
        self.pages_wanted = self._pages.demand_pages

    def shrink(self, keep: int) -> int:
        """Limit the cache to `keep` pages; return the number to `release` when they are free."""
        if self._pages is None:
            return 0
        returned = self._pages.shrink(keep)
        self._apply()
        return returned

    def release(self, pages: int) -> None:
        """Return pages that no sequence uses any more."""
        if self._pages is not None:
            self._pages.release(pages)

    def _apply(self) -> None:
        if (pages := self._pages) is None:
            self.limits = replace(self.limits, kv_blocks=self._granted)
            return
        pages.keep_for_others(self._granted)
        blocks, guaranteed = pages.blocks(self._granted), pages.guaranteed_blocks(self._granted)
        self.limits = replace(self.limits, kv_blocks=blocks, guaranteed_blocks=guaranteed)
