"""When a nodeagent probes its connection to NATS."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from services.nodeagent import app
from services.nodeagent.domain import events as e
from services.nodeagent.domain.state import NodeState
from services.nodeagent.loop import Loop
from shared.messaging import Mesh
from shared.settings import CommonSettings
from shared.tasks import end
from tests.unit.nodeagent.world import ERROR, World


async def test_the_connection_is_probed_as_soon_as_engines_are_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short THAW_ADOPT_TIMEOUT leaves no time for a second probe."""
    monkeypatch.setattr(app, "PROBE_EVERY_S", 3600.0)
    loop = Loop(World().state, lambda _: None)
    loop.post(e.Adopted(World().ready(), alive=True, error=ERROR))
    deciding = asyncio.create_task(loop.run())
    await loop.wait_until_idle()
    granted = loop.state.instances["i"].adopt_until
    assert granted is not None

    def is_renewed(state: NodeState) -> bool:
        return (state.instances["i"].adopt_until or 0.0) > granted

    agent = cast(app.Nodeagent, SimpleNamespace(loop=loop, mesh=Mesh(CommonSettings(), "test")))  # not connected
    probing = asyncio.create_task(app.Nodeagent._probe_until_adopted(agent))
    try:
        assert await loop.wait_until(is_renewed, loop.state.policy.adopt_s / 2)
    finally:
        await end(probing, deciding)
