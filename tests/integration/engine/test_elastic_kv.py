"""A batcher with changing numbers of pages: every request ends with the same tokens.

On a GPU the pages have memory, which is the stand-in's here (ADR 0107): the tests show that no step
touches an address without memory, and that memory is unmapped only after the work that uses it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from services.engine.domain.elastic_kv import Demand, Lease
from services.engine.domain.step_planning import BLOCK_TOKENS
from services.engine.generation.batcher import Batcher
from services.engine.generation.device_loop import DeviceLoop
from services.engine.generation.events import Broken, Event, Progressed
from services.engine.generation.kv_cache import SequenceKV
from services.engine.generation.kv_pages import KvPages
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.generation.request import GenerationRequest
from services.engine.generation.runner import PackedRunner, Row, Runner
from services.engine.model.gpu_kv import GpuKvMemory
from tests.integration.engine.loaded_model import LoadedModel
from tests.support.stand_in_gpu import StandInGpu

SHRINKS = 8
"""Then the pool is left alone, so that every request ends."""
PAGES = 6
"""Pages of the pool; a page has one block here."""


class Pool:
    """A loader with few pages, some of which others take at random."""

    def __init__(self, seed: int, memory: GpuKvMemory | None = None) -> None:
        self.batcher: Batcher | None = None
        self.memory = memory
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
            # Memory is released before the pages are returned.
            assert self.memory is None or self.memory.allocated_pages == self.held

    def _lend(self) -> None:
        more = max(0, min(self.free, self.demanded - self.held))
        if self.memory is not None:
            assert self.memory.add(more) == more
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


class Checked:
    """A runner whose work uses all mapped memory of the GPU until the engine waits for it."""

    def __init__(self, runner: PackedRunner, gpu: StandInGpu) -> None:
        self._runner, self._gpu = runner, gpu
        self.rewinds = runner.rewinds
        self.most_pages = 0

    def new_state(self) -> SequenceKV:
        return self._runner.new_state()

    def forget(self, adapter: LoraAdapter) -> None:
        self._runner.forget(adapter)

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        logits = self._runner.forward(rows)
        self._gpu.issue()
        self.most_pages = max(self.most_pages, self._gpu.mapped_pages)
        return logits


def tokens_of(
    loaded: LoadedModel, requests: Sequence[GenerationRequest], pool: Pool, runner: Runner | None = None
) -> dict[str, list[int]]:
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
        runner or loaded.computable.runner, loaded.computable.embedder, loaded.files.tokenization, limits, deliver
    )
    batcher.borrow(KvPages(Lease(1, PAGES, 1, 1, asked=Demand(1)), pool, PAGES, pool.memory))
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


def ask(loaded: LoadedModel) -> list[GenerationRequest]:
    prompts = [list(range(10 + i, 10 + i + length)) for i, length in enumerate((100, 120, 250, 20, 127))]
    return [loaded.request(i, prompt, max_tokens=40) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("seed", [1, 2])
def test_preempted_requests_end_with_the_same_tokens(loaded: LoadedModel, seed: int) -> None:
    requests = ask(loaded)
    expected = loaded.run(requests)
    pool = Pool(seed)
    found = tokens_of(loaded, requests, pool)
    assert found == {r: choices[0] for r, choices in expected.items()}
    assert pool.shrinks > 0
    assert pool.held + pool.free == PAGES


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_cache_in_pages_of_a_gpu_gives_the_same_tokens(loaded: LoadedModel, seed: int) -> None:
    requests, plain = ask(loaded), loaded.computable.runner
    expected = loaded.run(requests)
    assert isinstance(plain, PackedRunner)
    gpu = StandInGpu(PAGES)
    token_bytes = loaded.computable.block_bytes // BLOCK_TOKENS
    memory = plain.kv_memory = GpuKvMemory(gpu, token_bytes, 512)
    assert memory.block_pages == 1
    pool, runner = Pool(seed, memory), Checked(plain, gpu)
    try:
        found = tokens_of(loaded, requests, pool, runner)
    finally:
        plain.kv_memory = None
    assert found == {r: choices[0] for r, choices in expected.items()}
    assert pool.shrinks > 0
    assert 1 < runner.most_pages <= PAGES
    assert gpu.waits > 0
    assert gpu.allocated_pages == pool.held
    memory.remove(pool.held)
    memory.close()
    assert (gpu.memory.handles, gpu.memory.mappings, gpu.memory.reservations) == ({}, {}, {})
