"""A stage whose GPU does not compute any more ends its group.

torch's CUDA calls are replaced: a GPU that fails cannot be had on purpose.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import torch

from services.engine.generation.runner import DeviceLost, RunnerLost
from services.engine.stages.connections import Frame
from services.engine.stages.group_loss import GroupLoss
from services.engine.stages.part import StagePart
from services.engine.stages.steps import StageSteps
from shared.contracts.stages import StageFailed, StageRow, StageStep, split_layers

FAULT = "CUDA error: an illegal memory access was encountered"
GPU = torch.device("cuda", 1)


class FailingPart:
    """A part whose steps fail, on the second GPU of the node."""

    def __init__(self) -> None:
        self.layers, self.device, self.dtype = split_layers(2, 2)[1], GPU, torch.float32
        self.hidden_size = self.vocabulary = 1

    def compute(self, *_: object) -> torch.Tensor:
        raise RuntimeError(FAULT)

    def prepare(self, positions: list[int]) -> None:
        """Prepare nothing."""


class Ring:
    """Both connections of a stage: a step to receive, and the frames that were sent."""

    has_frame, error = True, None

    def __init__(self) -> None:
        self.sent: list[Frame] = []

    def get(self, timeout_s: float) -> Frame:
        return Frame(StageStep(number=0, rows=(StageRow(sequence=0, start=0, count=1),)), bytearray(4))

    def put(self, frame: Frame) -> None:
        self.sent.append(frame)


def stage(ring: Ring) -> StageSteps:
    both = cast(Any, ring)
    return StageSteps(cast(StagePart, cast(Any, FailingPart())), both, both, 1, 9, lambda: None)


def test_stage_that_loses_its_gpu_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer each later step with an error, and the group would continue for ever."""

    def synchronize(device: torch.device | None = None) -> None:
        if device == GPU:
            raise RuntimeError(FAULT)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        stage(Ring()).step()


def test_stage_whose_step_fails_on_a_working_gpu_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    ring = Ring()
    assert stage(ring).step()
    assert [type(frame.message) for frame in ring.sent] == [StageFailed]


async def test_engine_that_lost_its_gpu_says_so_and_names_no_stage() -> None:
    group, loop = GroupLoss(), asyncio.get_running_loop()
    for lost, text in (
        (DeviceLost("The GPU does not compute any more: a fault"), "The GPU does not compute any more: a fault"),
        (RunnerLost("The last stage has ended"), "A stage of the group has ended, so the group ends. The last stage has ended"),
    ):
        computing: asyncio.Future[None] = loop.create_future()
        computing.set_exception(lost)
        assert (await group.wait_for_failure(computing)).message == text
