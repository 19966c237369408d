"""Daemon threads for work that may block, kept for the next work.

`threading.Thread.start` waits until the new thread runs. An event loop that starts one stands still
for as long as the thread then keeps the interpreter.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_KEPT_IDLE = 8


class WorkerThreads:
    """Runs work in as many threads as are needed. They do not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle = 0
        self._is_closed = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread of its own. It handles its errors."""
        with self._lock:
            is_new = not self._idle
            if not is_new:
                self._idle -= 1
        self._work.put(work)
        if is_new:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def close(self) -> None:
        """End the idle threads, and the others after their work. No more work may be given."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                if self._is_closed or self._idle >= _KEPT_IDLE:
                    return
                self._idle += 1
