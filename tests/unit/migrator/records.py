"""Records of migrations that a migrator may take up."""

from __future__ import annotations

from shared.contracts.migration import MigrationRecord


def record(number: int, **more: object) -> MigrationRecord:
    fields = {
        "migration_id": f"m-{number}",
        "token": number,
        "model": "m",
        "revision": "r",
        "source_instance": "a",
        "source_node": "n",
        "instance_id": "b",
        "node": "n",
        "created": float(number),
    }
    return MigrationRecord.model_validate(fields | more)
