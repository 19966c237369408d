"""The files and batches of one API key, and the bounds on them.

Each function returns the next state. The state of a key is one entry of a bucket, so that a change
of a batch and of its files is one write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.domain.batches.batch import Batch
from shared.contracts.base import Frozen
from shared.errors import Conflict, InvalidRequest, NotFound, PayloadTooLarge, QueueFull

_RETRY_MS = 30_000


class StoredFile(Frozen):
    """The record of a file; the `FileStore` has its content.

    Attributes:
        created_at: Unix time in seconds.
        expires_at: Unix time in seconds at which the file is removed.
    """

    id: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: int
    expires_at: int


class OwnerState(Frozen):
    """Files and batches of one API key, oldest first."""

    files: tuple[StoredFile, ...] = ()
    batches: tuple[Batch, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def file(self, file_id: str) -> StoredFile:
        """Return a file. Raises `NotFound` if the key has none of this id."""
        found = next((file for file in self.files if file.id == file_id), None)
        if found is None:
            raise NotFound(f"No such File object: {file_id[:100]}", param="id")
        return found

    def batch(self, batch_id: str) -> Batch:
        """Return a batch. Raises `NotFound` if the key has none of this id."""
        found = next((batch for batch in self.batches if batch.id == batch_id), None)
        if found is None:
            raise NotFound(f"No batch found with id {batch_id[:100]!r}", param="id")
        return found


@dataclass(frozen=True)
class OwnerBounds:
    """Bounds on what one API key may have.

    Attributes:
        files: Number of files.
        size_bytes: Bytes of all files together.
        active_batches: Batches that have not ended.
        batches: Batches that are kept, active and ended.
    """

    files: int
    size_bytes: int
    active_batches: int
    batches: int


def expire_files(state: OwnerState, now: int) -> OwnerState:
    """Remove expired files, except the input of active batches."""
    used = {batch.input_file_id for batch in state.batches if batch.is_active}
    kept = tuple(file for file in state.files if file.expires_at > now or file.id in used)
    return state if len(kept) == len(state.files) else state.model_copy(update={"files": kept})


def check_room(state: OwnerState, more_bytes: int, bounds: OwnerBounds) -> None:
    """Check that another file fits.

    Raises:
        PayloadTooLarge: The key has as many files or bytes as it may have.
    """
    if len(state.files) >= bounds.files:
        raise PayloadTooLarge(f"This API key has {len(state.files)} files, and the limit is {bounds.files}. Delete some")
    if state.size_bytes + more_bytes > bounds.size_bytes:
        raise PayloadTooLarge(
            f"The files of this API key would have {state.size_bytes + more_bytes} bytes, and the limit is {bounds.size_bytes}. Delete some"
        )


def add_file(state: OwnerState, file: StoredFile, bounds: OwnerBounds) -> OwnerState:
    """Add an uploaded file, unless the key has it already. Raises as `check_room`."""
    if any(other.id == file.id for other in state.files):
        return state
    check_room(state, file.size_bytes, bounds)
    return state.model_copy(update={"files": (*state.files, file)})


def remove_file(state: OwnerState, file_id: str) -> OwnerState:
    """Remove a file.

    Raises:
        NotFound: The key has no such file.
        Conflict: An active batch is reading it.
    """
    state.file(file_id)
    if user := next((batch for batch in state.batches if batch.is_active and batch.input_file_id == file_id), None):
        raise Conflict(f"The batch {user.id} is reading this file. Cancel the batch first")
    return state.model_copy(update={"files": tuple(file for file in state.files if file.id != file_id)})


def add_batch(state: OwnerState, batch: Batch, bounds: OwnerBounds) -> OwnerState:
    """Add a batch that the key does not have; remove the oldest ended batches beyond the bound.

    Raises:
        NotFound: The input file does not exist.
        InvalidRequest: The input file has another purpose than `batch`.
        QueueFull: The key has as many active batches as it may have.
        PayloadTooLarge: There is no room for the batch's results.
    """
    if any(other.id == batch.id for other in state.batches):
        return state
    if state.file(batch.input_file_id).purpose != "batch":
        raise InvalidRequest("The input file must have the purpose 'batch'", param="input_file_id")
    active = sum(other.is_active for other in state.batches)
    if active >= bounds.active_batches:
        error = QueueFull(
            f"This API key has {active} batches that have not ended, and the limit is {bounds.active_batches}. Wait for one, or cancel one",
            retry_after_ms=_RETRY_MS,
        )
        error.limit = "active_batches"
        raise error
    check_room(state, 0, bounds)
    excess = len(state.batches) + 1 - bounds.batches
    removed = [other.id for other in state.batches if not other.is_active][: max(0, excess)]
    kept = tuple(other for other in state.batches if other.id not in removed)
    return state.model_copy(update={"batches": (*kept, batch)})


def change_batch(state: OwnerState, batch_id: str, change: Callable[[Batch], Batch]) -> OwnerState:
    """Replace a batch by its next state. Raises `NotFound` if the key has no such batch."""
    state.batch(batch_id)
    changed = tuple(change(batch) if batch.id == batch_id else batch for batch in state.batches)
    return state.model_copy(update={"batches": changed})


def end_batch(state: OwnerState, batch_id: str, change: Callable[[Batch], Batch], files: tuple[StoredFile, ...]) -> OwnerState:
    """End a batch and add the files of its results, in one change.

    The files may exceed the bound on bytes: the work is done. The next upload or batch is refused.
    """
    known = {file.id for file in state.files}
    new = tuple(file for file in files if file.id not in known)
    return change_batch(state, batch_id, change).model_copy(update={"files": (*state.files, *new)})
