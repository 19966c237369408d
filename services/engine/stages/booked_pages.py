"""The pages of a later stage's KV cache on a device with memory of its own (ADR 0056).

A group's KV cache does not grow with its load: all pages are booked for the stage, so that no other
process can ask for them, and no step waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from shared.contracts.engine import EngineStart
from shared.contracts.loader_socket import loader_socket
from shared.contracts.stages import whole_instance
from weights.kv_lease import PAGE_BYTES, KvLease, Lent, Shrink


class BookedPages:
    """Borrows pages for all bytes of the KV cache."""

    def __init__(self, start: EngineStart, node_state: Path) -> None:
        """Begin to borrow. Call it on the event loop.

        Args:
            start: The stage's start; its device has memory of its own.
            node_state: State directory of the node.
        """
        self._loop = asyncio.get_running_loop()
        self._missing = -(-start.kv_bytes // PAGE_BYTES)
        self._is_complete = asyncio.Event()
        instance, model = whole_instance(start.instance_id), start.card.name
        self._lease = KvLease(loader_socket(node_state), start.device, instance, self._missing, self._on_event, model=model)

    async def wait(self) -> None:
        """Wait until the loader has lent all pages."""
        await self._is_complete.wait()

    def abandon(self) -> None:
        """Stop borrowing; the pages stay until the process ends."""
        self._lease.abandon()

    def _on_event(self, event: Lent | Shrink) -> None:
        """Count pages, on the lease's thread. No page can be asked back: all are booked."""
        if isinstance(event, Lent):
            self._missing -= event.more
            if self._missing <= 0:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                    self._loop.call_soon_threadsafe(self._is_complete.set)
