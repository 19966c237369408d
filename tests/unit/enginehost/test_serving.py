"""The meters of a hosted engine, and its end under a request."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from services.enginehost.drivers.port import Driver
from services.enginehost.http1 import Client, HttpError
from services.enginehost.server import serving as server
from services.enginehost.server.serving import Serving
from shared.contracts.inference import InferFailed, InferRequest
from shared.errors import EngineFailed
from shared.messaging import Mesh


def test_cause_with_work_is_kept_longer_than_causes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its meter would begin again, and the ledger would miss that work."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    serving = Serving(cast(Mesh, None))
    for n in range(200):
        for cause in ("at work", f"other {n}"):
            with serving.work(f"prepare {n}", cause):
                now += 0.5
    found = {work.plan_id: work.seconds for work in serving.load().background}
    assert found["at work"] == pytest.approx(100.0)
    assert len(found) <= 65


@pytest.mark.parametrize(("was_killed", "code"), [(True, "engine_killed"), (False, "engine_failed")])
async def test_engine_that_ends_before_it_gets_the_request_is_lost(
    monkeypatch: pytest.MonkeyPatch, was_killed: bool, code: str
) -> None:
    """For example while the host asks for the prompt's tokens. The gateway sends it to another."""

    async def build(*_: Any) -> None:
        try:
            raise HttpError("the connection was closed early")
        except HttpError as e:
            raise EngineFailed(f"tokenising the prompt: {e}") from e

    async def is_killed() -> bool:
        return was_killed

    monkeypatch.setattr(server, "build_upstream_request", build)
    serving = Serving(cast(Mesh, None))
    serving.was_killed = is_killed
    serving.open(cast(Driver, object()), cast(Client, object()))
    request = InferRequest(request_id="r", instance_id="i", model="m", endpoint="completion", body={"model": "m", "prompt": "x"})
    await serving._handle_request(request, "reply", None, 100)
    async with asyncio.timeout(30):
        subject, body = await serving._outbox.get()
    failed = InferFailed.model_validate_json(body)
    assert (subject, failed.engine_lost, failed.error.code) == ("reply", True, code)
    assert "tokenising the prompt" in failed.error.message
