"""The tests' connection to the mesh: its requests wait for processes that are slow to reply."""

from __future__ import annotations

from typing import TypeVar

from shared.contracts.base import Request
from shared.messaging import Mesh

_PATIENCE_MS = 60_000
_R = TypeVar("_R", bound=Request)


def patient(request: _R) -> _R:
    """Return the request with a deadline of a minute or more, unless it states its own.

    A process on a busy machine may not run for longer than the usual deadline.
    """
    if "deadline_ms" in request.model_fields_set or request.deadline_ms >= _PATIENCE_MS:
        return request
    return request.model_copy(update={"deadline_ms": _PATIENCE_MS})


class PatientMesh(Mesh):
    """A mesh whose requests are `patient`."""

    async def fetch(self, subject: str, message: Request, *, with_reports: bool = False) -> bytes:
        return await super().fetch(subject, patient(message), with_reports=with_reports)
