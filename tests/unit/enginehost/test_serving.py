"""The meters of a hosted engine, and its end under a request."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any, cast

import pytest

from services.enginehost.drivers.port import Driver
from services.enginehost.http1 import Client, HttpError, HttpRequest
from services.enginehost.server import serving as server
from services.enginehost.server.serving import Serving
from services.enginehost.server.upstream_request import UpstreamRequest
from shared.contracts.inference import INFER_REPLY, InferData, InferEnd, InferFailed, InferRequest, InferResponse
from shared.engines import request_server
from shared.errors import EngineFailed
from shared.messaging import Mesh
from tests.support.slow_nats import SlowNats


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


class LongResponse:
    """A response of which the engine has more bytes at any moment."""

    status, headers = 200, {"content-type": "application/octet-stream"}

    def __init__(self, pieces: int) -> None:
        self.left = pieces

    async def read(self) -> bytes:
        self.left -= 1
        return b"x" * 1000 if self.left >= 0 else b""

    def close(self) -> None:
        pass


async def test_response_is_read_no_faster_than_nats_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a large one would fill the host's memory."""

    async def build(*_: Any) -> UpstreamRequest:
        return UpstreamRequest(HttpRequest("GET", "/file"))

    class Engine:
        async def send(self, _: HttpRequest) -> LongResponse:
            return response

    monkeypatch.setattr(server, "build_upstream_request", build)
    monkeypatch.setattr(request_server, "OUTBOX_BYTES", 20_000)
    nats, response = SlowNats(), LongResponse(200)
    serving = Serving(cast(Mesh, nats))
    serving.open(cast(Driver, object()), cast(Client, Engine()))
    request = InferRequest(request_id="r", instance_id="i", model="m", endpoint="other", route="/v1/file")
    await serving._handle_request(request, "reply", None, 100)
    served = serving.streams["r"].task
    assert served is not None
    for _ in range(1000):
        await asyncio.sleep(0)
    assert 150 < response.left < 200
    publishing = asyncio.create_task(serving.publish_forever())
    nats.takes.set()
    async with asyncio.timeout(30):
        await served
        await serving.flush()
    publishing.cancel()
    assert len(_read_response(nats, "reply")) == 200_000


async def test_responses_that_wait_for_nats_do_not_continue_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would exceed the room together, and fail."""

    async def build(*_: Any) -> UpstreamRequest:
        return UpstreamRequest(HttpRequest("GET", "/file"))

    class Engine:
        async def send(self, _: HttpRequest) -> LongResponse:
            return LongResponse(5)

    monkeypatch.setattr(server, "build_upstream_request", build)
    monkeypatch.setattr(request_server, "OUTBOX_BYTES", 20_000)
    nats = SlowNats()
    serving = Serving(cast(Mesh, nats))
    serving.open(cast(Driver, object()), cast(Client, Engine()))
    for n in range(20):
        request = InferRequest(request_id=f"r{n}", instance_id="i", model="m", endpoint="other", route="/v1/file")
        await serving._handle_request(request, f"reply.{n}", None, 100)
    served = [stream.task for stream in serving.streams.values() if stream.task is not None]
    for _ in range(100):
        await asyncio.sleep(0)
    publishing = asyncio.create_task(serving.publish_forever())
    nats.takes.set()
    async with asyncio.timeout(30):
        await asyncio.gather(*served, return_exceptions=True)
        await serving.flush()
    publishing.cancel()
    assert [len(_read_response(nats, f"reply.{n}")) for n in range(20)] == [5000] * 20


def _read_response(nats: SlowNats, reply: str) -> bytes:
    """Return the bytes of a complete response."""
    head, *data, end = [INFER_REPLY.validate_json(body) for body in nats.taken[reply]]
    assert isinstance(head, InferResponse)
    assert isinstance(end, InferEnd)
    return b"".join(base64.b64decode(r.data) for r in data if isinstance(r, InferData))
