"""Changes of a model's settings, merged and listed."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.domain.model_change import list_changes, merge_settings, version_of
from shared.contracts.models import ModelSpec
from shared.errors import InvalidRequest

SPEC = ModelSpec(name="m", source="https://user:secret@host/m", priority=3, aliases=("a",))


def merged(**settings: Any) -> ModelSpec:
    return ModelSpec.model_validate(merge_settings(SPEC, settings))


def test_settings_are_changed_and_the_others_stay() -> None:
    after = merged(pin=True, priority=None, aliases=["b"])
    assert after == SPEC.model_copy(update={"pin": True, "priority": 0, "aliases": ("b",)})
    changes = [(c.setting, c.before, c.after) for c in list_changes(SPEC, after)]
    assert sorted(changes) == [("aliases", ["a"], ["b"]), ("pin", False, True), ("priority", 3, 0)]
    assert list_changes(SPEC, merged()) == ()


@pytest.mark.parametrize("settings", [{"name": "n"}, {"source": "/m"}, {"no_such": 1}])
def test_other_models_and_unknown_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        merge_settings(SPEC, settings)
    assert caught.value.param in settings


def test_values_of_the_environment_are_not_listed() -> None:
    before = ModelSpec(name="m", source="/m", engine="vllm", env={"TOKEN": "old-secret"})
    after = before.model_copy(update={"env": {"TOKEN": "new-secret"}})
    [change] = list_changes(before, after)
    assert change.setting == "env"
    assert "secret" not in change.model_dump_json()


def test_version_is_that_of_all_settings() -> None:
    assert version_of(merged()) == version_of(SPEC)
    assert version_of(merged(pin=True)) != version_of(SPEC)
