"""Names that a thaw.yaml has declared are remembered until they are removed from the mesh."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.contracts.admin import ModelsAdded
from shared.contracts.keys import ApiKey, KeyList, NewKey
from shared.contracts.models import ModelSpec
from thaw.cli.api import Api
from thaw.cli.apply import apply_keys, apply_models
from thaw.cli.output import screen
from thaw.errors import CommandError
from thaw.launcher.home import Home

MUTE = screen(as_json=True)


class FailingApi(Api):
    """Applies changes, and fails at the one with the name `fails`."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("http://127.0.0.1:1")
        self.fails = fails
        self.keys: set[str] = set()
        self.models: set[str] = set()

    def _refuse(self, name: str) -> None:
        if name == self.fails:
            raise CommandError("The gateway did not answer.")

    def request(self, method: str, path: str, *_: Any, **__: Any) -> Any:
        name = path.rpartition("/")[2]
        if method == "GET":
            return KeyList(keys=tuple(ApiKey(name=n, scope="inference", created=0) for n in sorted(self.keys))).model_dump()
        if method == "PUT":
            self.keys.add(name)
            self._refuse(name)  # its reply is lost
        else:
            self._refuse(name)
            self.keys.discard(name)
        return {}

    def cluster(self) -> Any:
        return SimpleNamespace(models=[SimpleNamespace(card=SimpleNamespace(name=n, spec=model(n))) for n in sorted(self.models)])

    def add_models(self, specs: tuple[ModelSpec, ...], **_: Any) -> ModelsAdded:
        self.models |= {spec.name for spec in specs}
        for spec in specs:
            self._refuse(spec.name)  # the reply is lost
        return ModelsAdded()

    def remove_model(self, name: str, **_: Any) -> None:
        self._refuse(name)
        self.models.discard(name)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def key(name: str) -> NewKey:
    return NewKey(name=name, sha256="0" * 64)


def model(name: str) -> ModelSpec:
    return ModelSpec(name=name, source=f"hf://a/{name}")


@pytest.mark.parametrize("fails", ["leaves", "new"])
def test_a_key_is_revoked_though_the_command_that_made_it_failed(home: Home, fails: str) -> None:
    api = FailingApi()
    apply_keys(api, home, (key("leaves"),), MUTE)
    api.fails = fails
    with pytest.raises(CommandError):
        apply_keys(api, home, (key("new"),), MUTE)
    api.fails = ""
    apply_keys(api, home, (key("last"),), MUTE)
    assert api.keys == {"last"}
    assert json.loads((home.root / "declared.json").read_text()) == {"keys": ["last"]}


@pytest.mark.parametrize("fails", ["leaves", "new"])
def test_a_model_is_removed_though_the_command_that_added_it_failed(home: Home, fails: str) -> None:
    api = FailingApi()
    apply_models(api, home, (model("leaves"), model("first")), MUTE)
    api.fails = fails
    with pytest.raises(CommandError):
        apply_models(api, home, (model("new"),), MUTE)
    api.fails = ""
    apply_models(api, home, (model("last"),), MUTE)
    assert api.models == {"last"}
    assert json.loads((home.root / "declared.json").read_text()) == {"models": ["last"]}


def test_a_key_added_by_hand_outlives_a_file_that_failed_to_change_it(home: Home) -> None:
    api = FailingApi("mine")
    api.keys = {"mine"}
    with pytest.raises(CommandError):
        apply_keys(api, home, (key("mine"), key("new")), MUTE)
    api.fails = ""
    apply_keys(api, home, (key("last"),), MUTE)
    assert api.keys == {"mine", "last"}


def test_a_model_registered_by_hand_outlives_a_file_that_was_refused(home: Home) -> None:
    api = FailingApi("mine")
    api.models = {"mine"}
    with pytest.raises(CommandError):
        apply_models(api, home, (model("mine"), model("new")), MUTE)
    apply_models(api, home, (model("last"),), MUTE)
    assert api.models == {"mine", "last"}
