"""Responders that are started and stopped while the connection stays open."""

from __future__ import annotations

import gc
import weakref

import pytest

from shared.contracts.base import Done, Message
from shared.contracts.engine import ENGINE_CONTROL, EngineControl, PingEngine
from shared.errors import Unreachable
from shared.messaging import Mesh

SUBJECT = "thaw.test.owner"
LONG_MS = 3_600_000


class Owner:
    """The owner of a responder, such as an engine in an executor."""

    async def handle(self, _: EngineControl) -> Message:
        return Done()


@pytest.mark.parametrize("concurrent", [False, True], ids=["serial", "concurrent"])
async def test_stopped_responder_keeps_no_reference_to_its_owner(mesh: Mesh, concurrent: bool) -> None:
    """The event loop keeps the timers of cancelled deadlines, with the contexts of the requests."""

    async def answer_once() -> weakref.ref[Owner]:
        owner = Owner()
        responder = mesh.respond(SUBJECT, ENGINE_CONTROL, owner.handle, concurrent=concurrent, is_temporary=True)
        await responder.start()
        await mesh.flush()
        await mesh.request(SUBJECT, PingEngine(deadline_ms=LONG_MS), Done)
        await responder.stop()
        return weakref.ref(owner)

    owner = await answer_once()
    gc.collect()
    assert owner() is None
    with pytest.raises(Unreachable):
        await mesh.request(SUBJECT, PingEngine(), Done)
