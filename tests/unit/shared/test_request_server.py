"""Responses while NATS takes them slowly, or not at all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

import pytest

from shared.contracts.engine import EngineLoad
from shared.contracts.inference import INFER_REPLY, InferData, InferFailed, InferReply, InferRequest
from shared.engines import request_server
from shared.engines.request_server import RequestServer
from shared.messaging import Mesh
from tests.support.slow_nats import SlowNats

PIECE = "x" * 1000


@dataclass
class Response:
    request_id: str
    reply: str = "replies"
    seq: int = 0


class Server(RequestServer[Response]):
    """Sends what the test wants."""

    def __init__(self, nats: SlowNats) -> None:
        super().__init__(cast(Mesh, nats))
        self.cancelled: list[str] = []

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def _handle_request(self, request: InferRequest, reply: str, parent: str | None, size: int) -> None:
        raise NotImplementedError

    def _cancel_compute(self, stream: Response) -> None:
        self.cancelled.append(stream.request_id)

    def begin(self, request_id: str) -> Response:
        response = Response(request_id, f"replies.{request_id}")
        self._register(response)
        return response

    def send(self, response: Response) -> None:
        self._send(response, InferData(seq=response.seq, data=PIECE))


async def received(server: Server, nats: SlowNats) -> dict[str, list[InferReply]]:
    """Let NATS take all messages, and return them by subject."""
    publishing = asyncio.create_task(server.publish_forever())
    nats.takes.set()
    async with asyncio.timeout(30):
        await server.flush()
    publishing.cancel()
    return {subject: [INFER_REPLY.validate_json(body) for body in bodies] for subject, bodies in nats.taken.items()}


async def test_streams_that_exceed_the_outbox_fail_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_server, "OUTBOX_BYTES", 20_000)
    nats = SlowNats()
    server = Server(nats)
    large, small = server.begin("large"), server.begin("small")
    server.send(small)
    for _ in range(100):
        server.send(large)
    assert list(server.streams) == ["small"], "others may still send once there is room"
    assert server.cancelled == ["large"]
    found = await received(server, nats)
    assert sum(len(body) for bodies in nats.taken.values() for body in bodies) < 21_000
    *pieces, failed = found["replies.large"]
    assert isinstance(failed, InferFailed)
    assert (failed.error.code, failed.engine_lost) == ("unavailable", False)
    assert [r.seq for r in found["replies.large"]] == list(range(len(pieces) + 1))
    server.send(small)
    found = await received(server, nats)
    assert [(type(r), r.seq) for r in found["replies.small"]] == [(InferData, 0), (InferData, 1)]
