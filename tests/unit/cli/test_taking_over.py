"""`thaw up` adopts a mesh whose supervisor was killed.

Faults during that stop no serving process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from thaw.cli import up
from thaw.errors import CommandError
from thaw.launcher import control
from thaw.launcher.home import Home
from thaw.launcher.plan import Credentials, MeshPlan
from thaw.launcher.processes import Identity

PLAN = MeshPlan(credentials=Credentials(nats_password="n", database_password="d", admin_key="a"), nats_port=1, postgres_port=2)


@pytest.mark.parametrize(("survives", "stops"), [(True, 0), (False, 1)])
def test_crashing_service_stops_only_a_mesh_that_has_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: bool, stops: int
) -> None:
    """A service that keeps exiting stops only a mesh that has not served.

    Chaos seed 1: PostgreSQL, killed with the supervisor, failed three times in a row, and `thaw up`
    stopped the whole mesh.
    """
    stopped: list[Home] = []

    def crashes(*_: object) -> None:
        raise CommandError("postgres keeps ending.", "`thaw logs postgres` shows more.", code="service_crashes")

    monkeypatch.setattr(control, "launch", lambda *_: Identity(pid=1, started=0.0))
    monkeypatch.setattr(control, "await_running", crashes)
    monkeypatch.setattr(control, "stop", lambda home, _: stopped.append(home))
    with pytest.raises(CommandError):
        up._launch(Home(tmp_path), PLAN, Console(quiet=True), survives=survives)
    assert len(stopped) == stops
