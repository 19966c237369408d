"""Write-behind to the disk, from threads of low priority."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from weights.cache.background import lower_thread_priority
from weights.tiers.port import Cancelled

_WRITERS = 2
_SLICE_S = 0.1


class WriteBehind:
    """Tasks run in any order. A task handles its own errors."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="cache-write", initializer=lower_thread_priority)
        self._changed = threading.Condition()
        self._under: set[Future[None]] = set()

    def submit(self, write: Callable[[], None]) -> None:
        """Queue a task; not after `close`."""
        with self._changed:
            task = self._threads.submit(write)
            self._under.add(task)
        task.add_done_callback(self._forget_task)

    def wait_until_drained(self, stop: threading.Event | None = None) -> None:
        """Wait until the queue is empty. Raises `Cancelled` soon after `stop`."""
        self.wait_until_at_most(0, stop)

    def wait_until_at_most(self, tasks: int, stop: threading.Event | None = None) -> None:
        """Wait until at most `tasks` are queued or run. Raises `Cancelled` soon after `stop`."""
        with self._changed:
            while len(self._under) > tasks:
                self._changed.wait(_SLICE_S)  # `stop` wakes no waiter here
                if stop is not None and stop.is_set():
                    raise Cancelled

    def close(self) -> None:
        """Finish running tasks and drop the rest."""
        self._threads.shutdown(cancel_futures=True)

    def _forget_task(self, task: Future[None]) -> None:
        with self._changed:
            self._under.discard(task)
            self._changed.notify_all()
