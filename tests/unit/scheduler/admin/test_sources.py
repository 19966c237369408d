"""A registered model gets another source only by an explicit request."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.events import AddModelsRequested
from shared.contracts.admin import ModelsAdded
from shared.contracts.base import ErrorBody
from shared.contracts.models import ModelSpec
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.world import World

URL = "https://{}models.example/a.gguf{}"


@pytest.fixture
def w() -> World:
    world = World()
    world.node(budget=700 * MIB)
    assert isinstance(add(world, ModelSpec(name="a", source="/m/a")), ModelsAdded)
    return world


def add(w: World, *specs: ModelSpec, **options: Any) -> Any:
    w._asked += 1
    infos = {s.name: model_info(s.source, 100 * MIB) for s in specs}
    return w.admin(AddModelsRequested(w.now, f"x{w._asked}", specs, infos, False, **options))


def test_registration_with_another_source_is_a_conflict_and_changes_nothing(w: World) -> None:
    before = w.state.models["a"]
    answer = add(w, ModelSpec(name="b", source="/m/b"), ModelSpec(name="a", source="/m/other"))
    assert isinstance(answer, ErrorBody)
    assert (answer.code, answer.param) == ("conflict", "replace")
    assert "a is registered with another source (/m/a)" in answer.message
    assert "/m/other" in answer.message
    assert set(w.state.models) == {"a"}
    assert w.state.models["a"] is before


def test_replace_changes_the_source_and_restarts_the_engine(w: World) -> None:
    assert add(w, ModelSpec(name="a", source="/m/other"), replace=True).changed == ("a",)
    card = w.state.models["a"].card
    assert (card.spec.source, card.generation) == ("/m/other", 2)


def test_other_options_and_renewed_credentials_need_no_replace(w: World) -> None:
    assert add(w, ModelSpec(name="a", source="/m/a", priority=3)).changed == ("a",)
    assert add(w, ModelSpec(name="u", source=URL.format("me:old@", "?token=1"))).added == ("u",)
    assert add(w, ModelSpec(name="u", source=URL.format("me:new@", "?token=2"))).changed == ("u",)


@pytest.mark.parametrize("to", ["a", "b"])
def test_alias_moves_to_another_model_in_one_command(w: World, to: str) -> None:
    for target in ("b" if to == "a" else "a", to):
        named = {name: ("prod",) if name == target else () for name in ("a", "b")}
        add(w, *(ModelSpec(name=name, source=f"/m/{name}", aliases=aliases) for name, aliases in named.items()))
    model = w.state.model_named("prod")
    assert model is not None
    assert model.key == to
