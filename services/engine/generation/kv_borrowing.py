"""The pages that an engine's KV cache borrows of its device, from the start of the engine on.

The loader lends the booked pages while the model is bound, so that the first request does not wait
for them. Until the batcher serves, events of the lease are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.engine.domain.elastic_kv import Demand, Lease
from services.engine.generation.batcher import Batcher
from services.engine.generation.kv_pages import KvPages, PageMemory
from shared.contracts.engine import EngineStart
from shared.contracts.loader_socket import loader_socket
from weights.kv_lease import PAGE_BYTES, KvLease, Lent, LentMemory, Shrink


class GpuPages(PageMemory, LentMemory, Protocol):
    """Memory of lent pages on a GPU, for the lease and the batcher."""


class KvBorrowing:
    """Borrows pages for one engine. Used on the event loop."""

    def __init__(self, start: EngineStart, node_state: Path, memory: GpuPages | None = None) -> None:
        """Begin to borrow the booked pages.

        Args:
            start: The engine's start; its device has memory of its own.
            node_state: State directory of the node.
            memory: Memory of the pages, on a GPU; None: sequences allocate it.
        """
        self._memory = memory
        self._ceiling_bytes = start.kv_bytes
        booked = start.kv_floor_bytes
        self._floor_pages = _count_pages(self._ceiling_bytes if booked is None else min(self._ceiling_bytes, booked))
        self._events = _KeptEvents()
        path, device, model = loader_socket(node_state), start.device, start.card.name
        self.lease = KvLease(
            path,
            device,
            start.instance_id,
            self._floor_pages,
            self._events.deliver,
            ceiling_pages=_count_pages(self._ceiling_bytes),
            model=model,
            memory=memory,
        )

    def serve(self, batcher: Batcher, block_bytes: int) -> None:
        """Give the pages to a batcher, before it runs.

        Args:
            block_bytes: Bytes of one block of the KV cache.
        """
        floor, ceiling = self._floor_pages, _count_pages(self._ceiling_bytes)
        lease = Lease(floor, ceiling, block_bytes, PAGE_BYTES, asked=Demand(floor))
        batcher.borrow(KvPages(lease, self.lease, self._ceiling_bytes // block_bytes, self._memory))

        def deliver(event: Lent | Shrink) -> None:
            if isinstance(event, Lent):
                batcher.on_lent(event.more, is_answer=event.is_answer, turn=event.turn)
            else:
                batcher.shrink(event.keep)

        self._events.pass_on(deliver)

    def abandon(self) -> None:
        """Stop borrowing. The pages stay until the lease is closed, or the process ends."""
        self.lease.abandon()
        self._events.pass_on(_ignore)  # the batcher refers to the model


class _KeptEvents:
    """Keeps events of the lease's thread in order until they can be passed on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Lent | Shrink] = []
        self._deliver: Callable[[Lent | Shrink], None] | None = None

    def deliver(self, event: Lent | Shrink) -> None:
        with self._lock:
            if self._deliver is None:
                self._kept.append(event)
            else:
                self._deliver(event)

    def pass_on(self, deliver: Callable[[Lent | Shrink], None]) -> None:
        """Pass on all events from now on, those that were kept first."""
        with self._lock:
            kept, self._kept = self._kept, []
            self._deliver = deliver
            for event in kept:
                deliver(event)


def _count_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES)


def _ignore(_: Lent | Shrink) -> None:
    """Drop the event."""
