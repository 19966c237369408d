"""An engine whose GPU does not compute any more ends, and does not answer all requests with errors.

torch's CUDA calls are replaced: a GPU that fails cannot be had on purpose.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from services.engine.generation.batcher import Batcher
from services.engine.generation.device_loop import DeviceLoop
from services.engine.generation.events import Broken, Event
from services.engine.generation.runner import Row, RunnerLost
from tests.integration.engine.loaded_model import LoadedModel
from tests.integration.engine.recorded_batcher import request

pytestmark = pytest.mark.usefixtures("one_thread")
WITHIN_S = 60
FAULT = "CUDA error: an illegal memory access was encountered"
GPU = torch.device("cuda", 1)
"""That of the model. The computing thread's current GPU is the first one."""


@pytest.fixture
def loaded(demo_directory: Path) -> Iterator[LoadedModel]:
    loaded = LoadedModel(demo_directory, "float32")
    yield loaded
    loaded.close()


class Failing:
    """A runner whose steps fail."""

    def __init__(self, loaded: LoadedModel) -> None:
        assert loaded.computable.runner is not None
        self._runner = loaded.computable.runner
        self.rewinds = self._runner.rewinds
        self.new_state, self.forget = self._runner.new_state, self._runner.forget

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        raise RuntimeError(FAULT)


@pytest.fixture
def served(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(loaded.computable.embedder, "device", GPU)
    served = Served(loaded)
    yield served
    served.loop.stop()


class Served:
    """A batcher whose steps fail, on a thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.broken = threading.Event()
        self.batcher = Batcher(
            Failing(loaded), loaded.computable.embedder, loaded.files.tokenization, loaded.limits, self._on_events
        )
        self.loop = DeviceLoop(1)
        self.ended = self.loop.serve("test", self.batcher)

    def _on_events(self, events: Sequence[Event]) -> None:
        if any(isinstance(event, Broken) for event in events):
            self.broken.set()


def test_step_that_loses_the_gpu_ends_the_engine(loaded: LoadedModel, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device | None = None) -> None:
        if device == GPU:
            raise RuntimeError(FAULT)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    served.batcher.submit(request(loaded, "a"))
    assert isinstance(served.ended.exception(WITHIN_S), RunnerLost)


def test_step_that_fails_on_a_working_gpu_fails_its_requests(
    loaded: LoadedModel, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device | None] = []

    def synchronize(device: torch.device | None = None) -> None:
        asked.append(device)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    served.batcher.submit(request(loaded, "a"))
    assert served.broken.wait(WITHIN_S)
    assert asked == [GPU], "any other gets a context of this process, with its memory"
    served.batcher.stop()
    assert served.ended.result(WITHIN_S) is None
