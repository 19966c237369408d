"""A batch and its states.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
         │              ├───────────────────────▶ expired
         │              ├──▶ cancelling ────────▶ cancelled
         └──▶ failed    (validating may be cancelled as well)

The functions return the next state and raise nothing: a transition that does not apply, because
another gateway made it or a later one before, returns the batch unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from shared.contracts.base import Frozen

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ACTIVE: frozenset[Status] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
RESPONSES = "/v1/responses"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", RESPONSES)


class BatchError(Frozen):
    """A fault of an input file.

    Attributes:
        line: Counted from 1; None: the whole file.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(Frozen):
    """One batch.

    Attributes:
        window_s: Time in which the batch has to end, in seconds.
        created_at: Unix time in seconds, like all other times.
        model: The model of all its requests; None until the input is validated.
        output_file_id: File of the successful requests; None until the batch has ended with some.
        error_file_id: The same for failed requests.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    created_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[BatchError, ...] = ()
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def expires_at(self) -> int:
        return self.created_at + self.window_s

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE


Change = Callable[[Batch], Batch]


def begin(batch: Batch, model: str, total: int, now: int) -> Batch:
    """Start the requests of a batch whose input is valid."""
    if batch.status not in ("validating", "cancelling"):
        return batch
    status: Status = "in_progress" if batch.status == "validating" else batch.status
    return batch.model_copy(update={"status": status, "model": model, "total": total, "in_progress_at": now})


def fail(batch: Batch, errors: tuple[BatchError, ...], now: int) -> Batch:
    """Fail a batch whose input is invalid: none of its requests runs."""
    if not batch.is_active:
        return batch
    return batch.model_copy(update={"status": "failed", "errors": errors, "failed_at": now})


def count(batch: Batch, completed: int, failed: int) -> Batch:
    """Record how many requests have ended."""
    return batch.model_copy(update={"completed": completed, "failed": failed}) if batch.is_active else batch


def request_cancel(batch: Batch, now: int) -> Batch:
    """Cancel the batch for its owner. A batch that has ended, or is about to, stays as it is."""
    if batch.status not in ("validating", "in_progress"):
        return batch
    return batch.model_copy(update={"status": "cancelling", "cancelling_at": now})


def finalize(batch: Batch, now: int) -> Batch:
    """Finalize a batch whose requests have all ended: it can no longer be cancelled."""
    return batch.model_copy(update={"status": "finalizing", "finalizing_at": now}) if batch.status == "in_progress" else batch


def finish(batch: Batch, output_file_id: str | None, error_file_id: str | None, now: int) -> Batch:
    """End a batch whose files are ready.

    A batch that is still in progress has run out of time, and one that is cancelling is cancelled.
    """
    ends: dict[Status, tuple[Status, str]] = {
        "finalizing": ("completed", "completed_at"),
        "in_progress": ("expired", "expired_at"),
        "validating": ("expired", "expired_at"),
        "cancelling": ("cancelled", "cancelled_at"),
    }
    if batch.status not in ends:
        return batch
    status, at = ends[batch.status]
    return batch.model_copy(update={"status": status, at: now, "output_file_id": output_file_id, "error_file_id": error_file_id})
