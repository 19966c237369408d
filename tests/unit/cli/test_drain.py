"""`thaw node drain` reports a lost node as lost, not as empty."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from shared.contracts.admin import ClusterView, NodeView
from shared.contracts.migration import MigrationRecord
from thaw.cli import node as verbs
from thaw.cli.app import app


class Mesh:
    """A mesh of one node without instances, which reports or is lost."""

    is_alive = True

    @classmethod
    def find(cls) -> Mesh:
        return cls()

    def cluster(self) -> ClusterView:
        return ClusterView(scheduler="s", epoch=1, nodes=(NodeView(node="n1", alive=self.is_alive),))

    def migrations(self, **_: object) -> list[MigrationRecord]:
        return []

    def change_node(self, *_: str) -> None:
        pass


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_lost_node_is_not_called_empty(monkeypatch: pytest.MonkeyPatch, is_alive: bool) -> None:
    monkeypatch.setattr(Mesh, "is_alive", is_alive)
    monkeypatch.setattr(verbs, "Api", Mesh)
    for_people = CliRunner().invoke(app, ["node", "drain", "n1"])
    assert for_people.exit_code == (0 if is_alive else 1)
    assert ("n1 is empty" in for_people.output) is is_alive
    assert ("thaw node rm n1" in for_people.output) is not is_alive
    document = json.loads(CliRunner().invoke(app, ["node", "drain", "n1", "--json"]).output)
    assert (document["ok"], document["lost"]) == (is_alive, not is_alive)
