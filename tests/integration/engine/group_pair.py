"""A group of stages and one engine of the same model, between which requests move."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tests.integration.engine.engine_pair import Pair
from tests.integration.engine.processes import forked
from tests.integration.engine.stage_processes import LAYERS, Group
from tests.support.paced_zygote import Pace
from tests.support.segments import card_of
from thaw.demo.models import Shape, make_demo_model


def model(directory: Path, dtype: str) -> Path:
    return make_demo_model(directory / dtype, Shape(1024, 64, 160, LAYERS, 4, 2, 1024, dtype, 0.0))


class Started(Protocol):
    """Starts a group, and one engine of the same model, to which its requests move."""

    async def __call__(self, stages: int, dtype: str = "float32") -> Pair: ...


async def begin_pair(group: Group, directory: Path, stages: int, paces: tuple[Pace, Pace]) -> Pair:
    """Start the stages of a group, and one engine, with these paces."""
    await group.begin(directory, stages, paces[0])
    whole = group.engines.paced(card_of(directory), paces[1])
    pid = await forked(group.client, whole)
    first = await group.ready()
    assert (await group.engines.settled(whole.instance_id)).state == "ready"
    group.pids.append(pid)
    return Pair((first, whole.instance_id), (group.pids[0], pid), group.engines, group.client, paces)
