"""The record of a finished migration."""

from __future__ import annotations

from shared.contracts.migration import MigrationRecord, MigrationRound, MovedRequest

DONE = MigrationRecord(
    migration_id="m-1",
    token=1,
    model="one",
    revision="r",
    source_instance="i-1",
    source_node="node-0",
    instance_id="i-2",
    node="node-1",
    created=1.0,
    state="done",
    rounds=(
        MigrationRound(request_id="q-1", number=1, tokens=300, took_ms=41.0, gap=7),
        MigrationRound(request_id="p-1", number=1, tokens=200, took_ms=30.0, gap=2),
    ),
    requests=(
        MovedRequest(request_id="q-1", outcome="moved", tokens=90, pause_ms=31.0),
        MovedRequest(request_id="p-1", outcome="finished"),
    ),
    duration_ms=812.0,
)
