"""Two changes of one model's settings at the same time: the second names an outdated spec."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.events import AddModelsRequested
from shared.contracts.admin import ModelsAdded
from shared.contracts.base import ErrorBody
from shared.contracts.models import ModelSpec
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World


@pytest.fixture
def w() -> World:
    world = World()
    world.node(budget=700 * MIB)
    world.model("a", 100 * MIB, source="/m/a")
    return world


def change(w: World, after: ModelSpec, *before: ModelSpec) -> Any:
    w._asked += 1
    return w.admin(AddModelsRequested(w.now, f"x{w._asked}", (after,), {}, False, before=before))


def test_a_change_of_an_outdated_spec_is_a_conflict(w: World) -> None:
    present = w.state.models["a"].card.spec
    assert isinstance(change(w, present.model_copy(update={"priority": 3}), present), ModelsAdded)
    answer = change(w, present.model_copy(update={"max_concurrency": 2}), present)
    assert isinstance(answer, ErrorBody)
    assert (answer.code, answer.status) == ("conflict", 409)
    spec = w.state.models["a"].card.spec
    assert (spec.priority, spec.max_concurrency) == (3, present.max_concurrency)


def test_a_change_of_a_model_that_was_removed_is_a_conflict(w: World) -> None:
    present = w.state.models["a"].card.spec
    gone = present.model_copy(update={"name": "gone"})
    assert isinstance(change(w, gone.model_copy(update={"priority": 3}), gone), ErrorBody)
    assert set(w.state.models) == {"a"}
