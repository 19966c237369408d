"""Which responses of one API key stay stored: bounds on their count, bytes and age."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.base import Frozen


class StoredResponse(Frozen):
    """One stored response, in the index of its key.

    Attributes:
        stored_at: Unix time in seconds, by the clock of the gateway that stored it.
    """

    id: str
    size_bytes: int
    stored_at: float


class ResponseIndex(Frozen):
    """The stored responses of one API key, oldest first."""

    responses: tuple[StoredResponse, ...] = ()

    def has(self, response_id: str) -> bool:
        return any(found.id == response_id for found in self.responses)


@dataclass(frozen=True)
class StorageBounds:
    """Bounds on the stored responses of one API key."""

    count: int
    size_bytes: int
    age_s: float


def add_response(index: ResponseIndex, new: StoredResponse, bounds: StorageBounds) -> tuple[ResponseIndex, tuple[str, ...]]:
    """Add a response to an index.

    The oldest responses are removed beyond a bound. A response with the same id is replaced.

    Returns:
        The new index, and the ids of the responses to delete. `new` is one of them if it exceeds
        the bound on bytes by itself.
    """
    kept = [found for found in index.responses if found.id != new.id] + [new]
    total_bytes, oldest_at = sum(found.size_bytes for found in kept), new.stored_at - bounds.age_s
    removed = []
    while kept and (len(kept) > bounds.count or total_bytes > bounds.size_bytes or kept[0].stored_at < oldest_at):
        removed.append(kept[0].id)
        total_bytes -= kept.pop(0).size_bytes
    return ResponseIndex(responses=tuple(kept)), tuple(removed)


def remove_response(index: ResponseIndex, response_id: str) -> ResponseIndex:
    """Remove a response from an index."""
    return ResponseIndex(responses=tuple(found for found in index.responses if found.id != response_id))
