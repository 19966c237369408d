"""Requests wait at start for the copies that they need, and for no others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.gateway.adapters.key_marker import KeyMarker
from services.gateway.adapters.key_store import KeyStore
from services.gateway.domain.catalog import Catalog
from services.gateway.readiness import Readiness
from shared.errors import Unavailable
from shared.messaging import Mesh
from shared.settings import CommonSettings

LONG_S = 3600.0


class Starting:
    """A gateway that has joined, and has read neither bucket."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self.catalog, self.keys = Catalog(), KeyStore(KeyMarker(directory))
        mesh = Mesh(CommonSettings(), "test")
        self.readiness = Readiness(mesh, self.catalog, self.keys, asyncio.Event(), timeout_s)
        self.readiness.has_joined = True


@pytest.mark.parametrize(
    ("path", "needs_keys", "needs_models"),
    [
        ("/health", False, False),
        ("/ui", False, False),
        ("/admin/v1/keys", True, False),
        ("/v1/models", True, True),
        ("/api/chat", True, True),
    ],
)
@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("has_models", [False, True])
async def test_request_waits_for_the_copies_that_its_path_needs(
    tmp_path: Path, path: str, needs_keys: bool, needs_models: bool, has_keys: bool, has_models: bool
) -> None:
    gateway = Starting(tmp_path, 0.0)
    gateway.keys.complete, gateway.catalog.complete = has_keys, has_models
    if (has_keys or not needs_keys) and (has_models or not needs_models):
        await gateway.readiness.wait_for_state(path)
        return
    with pytest.raises(Unavailable) as refused:
        await gateway.readiness.wait_for_state(path)
    assert ("the API keys have not been read" in refused.value.message) is not has_keys
    assert ("the catalogue has not been read" in refused.value.message) is not has_models


async def test_waiting_requests_continue_at_the_tick_after_both_copies_were_read(tmp_path: Path) -> None:
    gateway = Starting(tmp_path, LONG_S)
    waiting = asyncio.create_task(gateway.readiness.wait_for_state("/v1/models"))
    for copy in (gateway.keys, gateway.catalog):
        gateway.readiness.on_tick()
        await asyncio.sleep(0)
        assert not gateway.readiness.is_state_read
        assert not waiting.done()
        copy.complete = True
    gateway.readiness.on_tick()
    assert gateway.readiness.is_state_read
    await asyncio.wait_for(waiting, 60)


async def test_requests_before_the_gateway_joined_are_refused(tmp_path: Path) -> None:
    gateway = Starting(tmp_path, 0.0)
    gateway.keys.complete = gateway.catalog.complete = True
    gateway.readiness.has_joined = False
    assert gateway.readiness.not_ready_reasons() == ["not connected to NATS yet"]
    with pytest.raises(Unavailable, match="not connected to NATS yet"):
        await gateway.readiness.wait_for_state("/v1/models")
