"""How far loads are is told often enough, and never left untold."""

from __future__ import annotations

import queue

from services.loader.adapters.progress import INTERVAL_S, Progress
from services.loader.domain.effects import StartRun
from services.loader.domain.events import Event, Fetched, Progressed
from tests.unit.loader.played import card


def test_the_last_word_is_told_though_nothing_follows_it() -> None:
    events: queue.Queue[Event] = queue.Queue()
    now = 100.0
    progress = Progress(events.put, lambda: now)
    progress.begin(StartRun("w", 1, card("w")), remote=True)
    progress.loaded(1, 10)
    for watermark in (20, 30, 25):  # within the interval
        progress.loaded(1, watermark)
    assert [events.get(timeout=10) for _ in range(4)] == [
        Progressed("w", 1, 10),
        Fetched("w", 1, 10),
        Progressed("w", 1, 30),
        Fetched("w", 1, 30),
    ]
    now += INTERVAL_S
    progress.over(1)
    progress.loaded(1, 40)
    progress.close()
    assert events.empty()
