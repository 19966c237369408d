"""A load run, in one process and without a loop."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from services.loader.adapters import run as module
from services.loader.adapters.cards import minimal_card
from services.loader.adapters.progress import Progress
from services.loader.adapters.run import Run, RunContext, Threads
from services.loader.adapters.runs import Runs
from services.loader.domain.effects import StartRun
from services.loader.domain.events import Event, LaidOut
from tests.unit.loader.checkpoints import write_checkpoint
from weights.cache.store import SsdCache
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory
from weights.sources.sources import Sources
from weights.transfer.fill import Filling
from weights.transfer.link import Link, Transfer
from weights.transfer.links import Links


def test_request_during_the_layout_of_a_prefetch_raises_its_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "m")
    sources = Sources(SsdCache(tmp_path / "cache", 0), (tmp_path / "small",))
    card = minimal_card(sources, str(tmp_path / "m"))
    pool, links = PoolMemory(None, CHUNK_BYTES), Links("fair")

    def emit(event: Event) -> None:
        if isinstance(event, LaidOut):
            run.grant((0,))

    class Hurried(Filling):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            run.raise_priority()  # from the loop's thread, at the worst moment

    submitted: list[Transfer] = []

    def submit(transfer: Transfer) -> Transfer:
        submitted.append(transfer)
        return Link.submit(link, transfer)

    link = links.get(sources.open(card.info.source, card.info.revision).link, 1)
    monkeypatch.setattr(module, "Filling", Hurried)
    monkeypatch.setattr(link, "submit", submit)
    progress = Progress(emit)
    run = Run(
        StartRun("w", 1, card, background=True), RunContext(pool, sources, emit, Threads(1, 1), links, progress), background=True
    )
    try:
        run.load()
        assert [t.background for t in submitted] == [False]
    finally:
        run.close()
        progress.close()
        links.close()
        pool.close()


def test_loads_that_wait_for_memory_do_not_keep_others_from_starting(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    sources = Sources(SsdCache(tmp_path / "cache", 0), (tmp_path / "small",))
    card, pool = minimal_card(sources, str(tmp_path / "m")), PoolMemory(None, CHUNK_BYTES)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    runs = Runs(pool, sources, events.put, Threads(1, 1))
    try:
        for run in range(40):
            runs.start(StartRun(f"w{run}", run, card))
        waiting: set[int] = set()
        while len(waiting) < 40:
            if isinstance(event := events.get(timeout=60), LaidOut):
                waiting.add(event.run)
    finally:
        runs.close()
        pool.close()
