"""Keep a migration's record within the size of a NATS message."""

from __future__ import annotations

from shared.contracts.base import ErrorBody
from shared.contracts.migration import MigrationRecord
from shared.errors import PayloadTooLarge

REASON_CHARACTERS = 100
"""Length of reasons and errors in a record that would otherwise be too large."""


def fit_record(record: MigrationRecord, max_bytes: int) -> MigrationRecord | None:
    """Return `record` without the details that do not fit in `max_bytes` of JSON.

    1. It fits.
    2. The oldest rounds are left out: the scheduler learns its times from the others.
    3. Reasons and errors are shortened.

    Returns:
        None if the outcomes of its requests alone are too large.
    """
    if count_bytes(record) <= max_bytes:  # 1
        return record
    while record.rounds:  # 2
        record = record.model_copy(update={"rounds": record.rounds[len(record.rounds) // 2 + 1 :]})
        if count_bytes(record) <= max_bytes:
            return record
    requests = tuple(m.model_copy(update={"reason": m.reason[:REASON_CHARACTERS]}) for m in record.requests)  # 3
    record = record.model_copy(update={"requests": requests, "error": _shorten(record.error)})
    return record if count_bytes(record) <= max_bytes else None


def refuse_record(record: MigrationRecord, max_bytes: int) -> MigrationRecord:
    """Return the last record of a migration whose outcomes do not fit in `max_bytes`: it failed."""
    error = PayloadTooLarge(
        f"The record of a migration of {len(record.requests)} requests does not fit in the {max_bytes} bytes that NATS takes; "
        "raise its max_payload"
    )
    return record.model_copy(update={"state": "failed", "error": error.body(), "rounds": (), "requests": ()})


def count_bytes(record: MigrationRecord) -> int:
    """Return the size of `record` as JSON in UTF-8."""
    return len(record.model_dump_json().encode())


def _shorten(error: ErrorBody | None) -> ErrorBody | None:
    return error.model_copy(update={"message": error.message[:REASON_CHARACTERS]}) if error is not None else None
