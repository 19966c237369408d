"""Live views for the console's pages.

A feed reads its view once a second while a page is subscribed, and never otherwise. Each change is
computed and encoded once for all pages. The pause between two readings is at least a hundred times
the processor time of the last one: a feed costs at most 1 % of a core, however large the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

from services.gateway.domain.console_view import View, difference
from shared.compact_json import encode_json
from shared.errors import QueueFull, ThawError

log = logging.getLogger(__name__)
INTERVAL_S = 1.0
_COST_FACTOR = 150.0
"""A reading waits so many times as long as the last one took: sending the changes costs as well."""
_MAX_QUEUED = 16
_MAX_PAGES = 64
_KEEP_ALIVE_S = 5.0
Reader = Callable[[], Awaitable[Callable[[], View]]]
"""Reads what a view is made of, and returns the function that makes it: that one is timed, and runs
in a thread.
"""


def encode_event(topic: str, data: Any) -> bytes:
    """Format a server-sent event."""
    return f"event: {topic}\ndata: ".encode() + encode_json(data) + b"\n\n"


class Subscription:
    """The events of one page, from one or several feeds.

    The queue is bounded. When it is full its entries are dropped, and every feed sends its whole
    view next.
    """

    def __init__(self) -> None:
        self._queue: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._lagging: set[Feed] = set()

    def put(self, feed: Feed, event: bytes) -> None:
        """Queue an event of a feed."""
        if feed in self._lagging:
            self._arrived.set()
            return
        if len(self._queue) >= _MAX_QUEUED:
            self._queue.clear()
            self._lagging.add(feed)
        else:
            self._queue.append(event)
        self._arrived.set()

    async def events(self, closing: asyncio.Event) -> AsyncGenerator[bytes, None]:
        """Yield events until `closing` is set, and a comment while there are none."""
        ended = asyncio.create_task(closing.wait(), name="console closing")
        try:
            while not closing.is_set():
                # Before the queue is read: it may overflow while the page reads an event.
                self._arrived.clear()
                for feed in self._lagging:
                    self._queue.append(feed.whole_view())
                self._lagging.clear()
                while self._queue:
                    yield self._queue.popleft()
                arrived = asyncio.create_task(self._arrived.wait(), name="console event")
                done, _ = await asyncio.wait({arrived, ended}, timeout=_KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                arrived.cancel()
                if not done:
                    yield b": no change\n\n"
        finally:
            ended.cancel()


class Feed:
    """One kind of view, shared by all pages that show it.

    Args:
        topic: The name of its events.
        read: Reads the present view.
    """

    def __init__(self, topic: str, read: Reader) -> None:
        self.topic = topic
        self._read = read
        self._view: View = {}
        self._error: str | None = None
        self._seq = 0
        self._whole: tuple[int, bytes] | None = None
        self._is_read = False
        self._pages: set[Subscription] = set()
        self._task: asyncio.Task[None] | None = None

    def require_room(self) -> None:
        """Raise `QueueFull` if too many pages are open."""
        if len(self._pages) >= _MAX_PAGES:
            error = QueueFull(f"{_MAX_PAGES} pages of the console are open at this gateway. Close some")
            error.limit = "console_pages"
            raise error

    @contextlib.contextmanager
    def subscribed(self, page: Subscription) -> Iterator[None]:
        """Send the page the whole view, then its changes."""
        self._pages.add(page)
        if self._is_read:
            page.put(self, self.whole_view())
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"console {self.topic}")
        try:
            yield
        finally:
            self._pages.discard(page)
            if not self._pages and self._task is not None:
                self._task.cancel()
                self._task, self._is_read, self._view, self._whole = None, False, {}, None

    def whole_view(self) -> bytes:
        """Encode the present view as an event, once for all pages that need it."""
        if self._whole is None or self._whole[0] != self._seq:
            data = {"seq": self._seq, "at": round(time.time(), 1), "view": self._view, "error": self._error}
            self._whole = (self._seq, encode_event(self.topic, data))
        return self._whole[1]

    async def _run(self) -> None:
        while True:
            cost_s = await self._update()
            await asyncio.sleep(max(INTERVAL_S, _COST_FACTOR * cost_s))

    async def _update(self) -> float:
        """Read the view and send what changed. Returns the seconds of processor time."""
        error, cost_s = None, 0.0
        changes: Any = {}
        try:
            make = await self._read()
            view, changes, cost_s = await asyncio.to_thread(_make, make, self._view)
            self._view = view
        except ThawError as e:
            error = e.message
        except Exception:
            log.exception("failed to read a view of the console", extra={"topic": self.topic})
            error = "The gateway failed to read this view. See `thaw logs gateway`"
        self._seq += 1
        if not self._is_read:
            self._is_read, self._error = True, error
            self._send(self.whole_view())
        elif changes or error != self._error:
            self._error = error
            at = round(time.time(), 1)
            self._send(encode_event(self.topic, {"seq": self._seq, "at": at, "changes": changes, "error": error}))
        return cost_s

    def _send(self, event: bytes) -> None:
        for page in self._pages:
            page.put(self, event)


def _make(make: Callable[[], View], before: View) -> tuple[View, Any, float]:
    started = time.thread_time()
    view = make()
    changes = difference(before, view)
    return view, changes, time.thread_time() - started
