"""`thaw wake`, interrupted before the model is ready."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from shared.contracts.admin import ClusterView, NodeView
from shared.contracts.node import InstanceState
from tests.unit.cli.test_ps import VIEW, instance
from thaw.cli import wake as verbs
from thaw.cli.app import app


class Impatient:
    """An operator who presses Ctrl-C."""

    @classmethod
    def find(cls) -> Impatient:
        return cls()

    def wake(self, model: str) -> Any:
        raise KeyboardInterrupt


def test_who_leaves_is_told_how_to_call_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "Api", Impatient)
    result = CliRunner().invoke(app, ["wake", "coder"])
    assert result.exit_code == 130
    assert "`thaw sleep coder` calls it off" in result.output


def test_a_suspended_model_is_called_suspended() -> None:
    node = NodeView(node="n", alive=True, instances=(instance(InstanceState.SUSPENDED),))
    cluster = ClusterView(scheduler="s", epoch=1, models=(VIEW,), nodes=(node,))
    assert "suspended already" in verbs.nothing_left(cluster, "m")
    assert "on no device" in verbs.nothing_left(cluster.model_copy(update={"nodes": ()}), "m")
