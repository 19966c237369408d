"""A batcher with changing numbers of pages: every request ends with the same tokens."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from services.engine.domain.elastic_kv import Demand, Lease
from services.engine.generation.batcher import Batcher
from services.engine.generation.device_loop import DeviceLoop
from services.engine.generation.events import Broken, Event, Progressed
from services.engine.generation.kv_pages import KvPages
from services.engine.generation.request import GenerationRequest
from tests.integration.engine.test_families import LoadedModel

SHRINKS = 8
"""Then the pool is left alone, so that every request ends."""
PAGES = 6
"""Of the pool; a page has one block here."""


class Pool:
    """A loader with few pages, some of which others take at random."""

    def __init__(self, seed: int) -> None:
        self.batcher: Batcher | None = None
        self.draw = random.Random(seed)
        self.held = self.demanded = self.turn = 0
        self.safe = 1
        self.free = PAGES
        self.lock = threading.Lock()
        self.shrinks = 0

    def demand(self, pages: int, turn: int = 0, turn_pages: int = 0) -> None:
        with self.lock:
            self.demanded, self.turn, self.safe = pages, turn, max(1, turn_pages)
            self._lend()

    def give_back(self, pages: int) -> None:
        with self.lock:
            self.held -= pages
            self.free += pages
            assert self.held >= 0

    def _lend(self) -> None:
        more = max(0, min(self.free, self.demanded - self.held))
        self.held += more
        self.free -= more
        assert self.batcher is not None
        self.batcher.on_lent(more, is_answer=True, turn=self.turn)

    def disturb(self) -> None:
        """Ask for pages, or lend those that are free."""
        assert self.batcher is not None
        with self.lock:
            if self.held > self.safe and self.shrinks < SHRINKS and self.draw.random() < 0.5:
                self.shrinks += 1
                self.batcher.shrink(self.draw.randint(self.safe, self.held - 1))
            else:
                self._lend()


@pytest.fixture(scope="module")
def loaded(demo_directory: Path) -> Iterator[LoadedModel]:
    loaded = LoadedModel(demo_directory, "float32")
    yield loaded
    loaded.close()


def tokens_of(loaded: LoadedModel, requests: Sequence[GenerationRequest], pool: Pool) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {r.request_id: [] for r in requests}
    over: set[str] = set()
    grew = threading.Condition()

    def deliver(events: Sequence[Event]) -> None:
        with grew:
            for event in events:
                assert not isinstance(event, Broken), event
                if isinstance(event, Progressed):
                    found[event.request_id] += [t for d in event.deltas for t in d.token_ids]
                    over.update({event.request_id} if event.done else ())
            grew.notify_all()

    limits = loaded.limits.__class__(8, PAGES, loaded.limits.step_tokens, loaded.limits.chunk_tokens)
    batcher = pool.batcher = Batcher(
        loaded.computable.runner, loaded.computable.embedder, loaded.files.tokenization, limits, deliver
    )
    batcher.borrow(KvPages(Lease(1, PAGES, 1, 1, asked=Demand(1)), pool, PAGES))
    pool.demand(1)
    loop = DeviceLoop(1)
    ended = loop.serve("test", batcher)
    try:
        for request in requests:
            batcher.submit(request)
        with grew:
            for _ in range(4000):
                if over == set(found):
                    break
                grew.wait(0.05)
                pool.disturb()
    finally:
        batcher.stop()
        ended.result(60)
        loop.stop()
    assert over == set(found), "not every request ended"
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_preempted_requests_end_with_the_same_tokens(loaded: LoadedModel, seed: int) -> None:
    prompts = [list(range(10 + i, 10 + i + length)) for i, length in enumerate((100, 120, 250, 20, 127))]
    requests = [loaded.request(i, prompt, max_tokens=40) for i, prompt in enumerate(prompts)]
    expected = loaded.run(requests)
    pool = Pool(seed)
    found = tokens_of(loaded, requests, pool)
    assert found == {r: choices[0] for r, choices in expected.items()}
    assert pool.shrinks > 0
    assert pool.held + pool.free == PAGES
