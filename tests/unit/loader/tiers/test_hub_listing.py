"""The hub's listing of a model, and errors while it is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi

from shared.errors import Unavailable
from weights.tiers.hub import open_hub


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def test_unknown_form_of_the_library_is_not_taken_for_a_server_that_is_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of huggingface_hub that names a file otherwise is not the fault of HF_ENDPOINT."""
    info = SimpleNamespace(sha="0" * 40, siblings=[SimpleNamespace(path="config.json", size=2, lfs=None)])
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: info)
    with pytest.raises(AttributeError, match="rfilename"):
        open_hub("hf://org/model")


@pytest.mark.parametrize("error", [TypeError, AttributeError, KeyError, ValueError])
def test_json_of_another_form_is_of_a_server_that_is_no_hub(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def parse(*_: Any, **__: Any) -> None:
        raise error("a list")

    monkeypatch.setattr(HfApi, "model_info", parse)
    with pytest.raises(Unavailable, match="not a hub"):
        open_hub("hf://org/model")
