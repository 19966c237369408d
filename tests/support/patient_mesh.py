"""The tests' connection to the mesh: its requests wait for processes that are slow to reply."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

import pytest

from shared.contracts.base import Request
from shared.messaging import Mesh
from tests.support.mesh_client import connected_mesh
from tests.support.servers import NatsServer

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


@pytest.fixture
async def mesh(nats_server: NatsServer) -> AsyncIterator[Mesh]:
    """Connect a patient mesh to the NATS server that all tests of a process share."""
    async with connected_mesh(nats_server, PatientMesh) as mesh:
        yield mesh
