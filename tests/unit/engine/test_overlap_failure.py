"""An engine that computes while its weights arrive, and whose computing thread fails."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from services.engine.app import Engine
from services.engine.generation.runner import DeviceLost
from services.engine.model.overlap import Overlap
from services.engine.stages.group_loss import GroupLoss
from shared.contracts.loader import WeightsAttached
from shared.errors import CheckpointInvalid, EngineFailed

ATTACHED = WeightsAttached(weights_id="w", segment="s", directory="d", total_bytes=1, loaded_bytes=1)


class Load:
    """A load that the test ends."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[WeightsAttached] = asyncio.get_running_loop().create_future()

    async def finish(self) -> WeightsAttached:
        return await self.ended


class Loading:
    """An engine that waits for a load, and for its computing thread."""

    def __init__(self) -> None:
        self.load, self.computing = Load(), asyncio.get_running_loop().create_future()
        engine = Engine.__new__(Engine)
        engine._group, engine._computing = GroupLoss(), self.computing
        self.finishing = asyncio.create_task(engine._finish_overlap(cast(Overlap, cast(Any, self.load))))


async def test_engine_whose_computing_thread_fails_does_not_wait_for_the_load() -> None:
    """Else it would wait for ever: the end of a load waits for that thread, too."""
    loading = Loading()
    loading.computing.set_exception(DeviceLost("The GPU does not compute any more"))
    with pytest.raises(EngineFailed, match=r"^The GPU does not compute any more"):
        await asyncio.wait_for(loading.finishing, 60)
    assert loading.load.ended.cancelled()


async def test_load_that_ends_first_is_the_result() -> None:
    loading = Loading()
    loading.load.ended.set_result(ATTACHED)
    assert await loading.finishing == ATTACHED


async def test_error_of_the_load_is_the_error() -> None:
    loading = Loading()
    loading.load.ended.set_exception(CheckpointInvalid("damaged"))
    with pytest.raises(CheckpointInvalid):
        await loading.finishing
