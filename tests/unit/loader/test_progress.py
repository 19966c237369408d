"""Progress of loads is reported often enough, and the last report is never lost."""

from __future__ import annotations

import queue
import threading

from services.loader.adapters.progress import INTERVAL_S, Progress
from services.loader.domain.effects import StartRun
from services.loader.domain.events import Event, Fetched, Progressed
from tests.unit.loader.played import card


def test_last_progress_is_reported_even_if_no_event_follows() -> None:
    events: queue.Queue[Event] = queue.Queue()
    now = 100.0
    progress = Progress(events.put, lambda: now)
    progress.begin(StartRun("w", 1, card("w")), remote=True)
    progress.record_loaded(1, 10, 15)
    for watermark, arrived in ((20, 35), (30, 40), (25, 50)):  # within the interval
        progress.record_loaded(1, watermark, arrived)
    assert [events.get(timeout=60) for _ in range(4)] == [
        Progressed("w", 1, 10, 15),
        Fetched("w", 1, 15),
        Progressed("w", 1, 30, 50),
        Fetched("w", 1, 50),
    ]
    now += INTERVAL_S
    progress.end(1)
    progress.record_loaded(1, 40, 60)
    progress.close()
    assert events.empty()


class ClosedMeanwhile(threading.Event):
    """An event that `close` sets right after the thread has found it unset."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def wait(self, timeout: float | None = None) -> bool:
        was_set = super().wait(0)
        self.set()
        self._progress._deferred.set()
        return was_set


def test_close_ends_the_thread_at_any_time() -> None:
    progress = Progress(lambda event: None, lambda: 100.0)
    progress._closing = ClosedMeanwhile(progress)
    progress.begin(StartRun("w", 1, card("w")), remote=False)
    progress.record_loaded(1, 10, 10)
    progress.record_loaded(1, 20, 20)  # within the interval: the thread sends it later
    assert progress._thread is not None
    progress._thread.join(60)
    assert not progress._thread.is_alive()
