"""The leader's copy of the bucket of migrations."""

from __future__ import annotations

from typing import cast

import pytest

from services.scheduler.adapters import clock
from services.scheduler.adapters.migrations import Migrations
from services.scheduler.domain.events import Event, MigrationUpdated
from shared.contracts.migration import MIGRATION_KEPT_S, MigrationRecord, MigrationState
from shared.messaging import Mesh


def record(name: str, state: MigrationState = "done") -> MigrationRecord:
    return MigrationRecord(
        migration_id=name,
        token=1,
        model="m",
        revision="r",
        source_instance="i-1",
        source_node="n1",
        instance_id="i-2",
        node="n2",
        created=0.0,
        state=state,
    )


def test_expired_records_are_dropped_from_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(clock, "now", lambda: now)
    events: list[Event] = []
    copy = Migrations(cast(Mesh, None), events.append)
    for found in (record("old"), record("stuck", "preparing"), record("busy", "preparing")):
        copy.put(found.migration_id, found.model_dump_json().encode())
    now += MIGRATION_KEPT_S / 2
    copy.put("busy", record("busy", "handing_over").model_dump_json().encode())
    now += MIGRATION_KEPT_S / 2 + 1
    copy.put("new", record("new").model_dump_json().encode())
    assert {r.migration_id for r in copy.list_latest(None, 100)} == {"busy", "new"}
    # A migration without changes for so long has no worker: its waiting clients get an end.
    states = [(e.record.migration_id, e.record.state) for e in events if isinstance(e, MigrationUpdated)]
    assert states[-1] == ("stuck", "cancelled")
    assert ("old", "cancelled") not in states
