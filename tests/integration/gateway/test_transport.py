"""TLS, CORS, and the time to detect a disconnected client."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shared.contracts.node import InstanceState
from shared.messaging import Mesh
from shared.tasks import end
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.support.fake_engine import FakeNode, Run, hang

URL = "/v1/chat/completions"
NOTICED_S = 0.1
ORIGIN = {"origin": "https://page.example"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def test_tls_gateway_serves_only_clients_that_trust_its_certificate(
    node: FakeNode, serve: ServeFn, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    async with serve(tls_certificate=cert, tls_key=key) as served:
        await until_listed(served, CARDS)
        await node.engine("alpha")
        trusting = httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(cert)), timeout=60)
        answer = await trusting.post(f"{served.base}{URL}", json=chat(stream=True))
        assert answer.text.endswith("data: [DONE]\n\n")
        await trusting.aclose()
        trust = os.environ | {"THAW_URL": served.base, "SSL_CERT_FILE": str(cert)}
        assert [(await _ps(trust))["code"], (await _ps(trust | {"SSL_CERT_FILE": ""}))["code"]] == ["unreachable", "certificate"]
        async with httpx.AsyncClient(timeout=60) as doubting:
            with pytest.raises(httpx.ConnectError):
                await doubting.get(f"{served.base}/health")
            with pytest.raises(httpx.TransportError):
                await doubting.get(f"{served.base.replace('https', 'http')}/health")


async def _ps(environment: dict[str, str]) -> dict[str, str]:
    """Return the error of `thaw ps`: no connection to the gateway, or no scheduler."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "thaw.cli.app", "ps", "--json", env=environment, stdout=asyncio.subprocess.PIPE
    )
    found: dict[str, str] = json.loads((await process.communicate())[0])["error"]
    return found


@pytest.fixture
async def shared(node: FakeNode, serve: ServeFn) -> AsyncIterator[Served]:
    async with serve(cors_origins="https://page.example, https://other.example", admin_key="root") as served:
        await until_listed(served, CARDS)
        yield served


async def test_a_preflight_is_answered_without_a_key(shared: Served) -> None:
    asks = ORIGIN | {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    answer = await shared.http.options(URL, headers=asks)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN["origin"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert answer.headers["x-request-id"]
    assert (await shared.http.options(URL, headers=asks | {"x-request-id": "mine"})).headers["x-client-request-id"] == "mine"
    other = await shared.http.options(URL, headers=asks | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_pages_may_read_answers_and_errors(shared: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    for answer in (
        await shared.http.post(URL, json=chat(), headers=ORIGIN),
        await shared.http.post(URL, json=chat("nobody"), headers=ORIGIN),
        await shared.http.get("/admin/v1/keys", headers=ORIGIN),
    ):
        assert answer.headers["access-control-allow-origin"] == ORIGIN["origin"]
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        assert answer.headers["x-request-id"]


async def test_cors_is_off_without_configured_origins(gateway: Served) -> None:
    answer = await gateway.http.get("/v1/models", headers=ORIGIN)
    assert "access-control-allow-origin" not in answer.headers


# Disconnecting.


async def prefill(run: Run) -> None:
    await run.start()
    await run.cancelled.wait()


async def silence(run: Run) -> None:
    await run.cancelled.wait()


class Client:
    """A connection that the test closes."""

    def __init__(self, served: Served, headers: dict[str, str] | None = None, **fields: Any) -> None:
        self.served = served
        self.body = httpx.Request("POST", served.base, json=chat(**fields)).content
        self.headers = "".join(f"{k}: {v}\r\n" for k, v in (headers or {}).items())

    async def send(self) -> asyncio.StreamReader:
        port = self.served.settings.gateway_port
        reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.writer.write(
            f"POST {URL} HTTP/1.1\r\nhost: localhost\r\n{self.headers}content-length: {len(self.body)}\r\n\r\n".encode() + self.body
        )
        await self.writer.drain()
        return reader

    async def leave(self) -> float:
        """Disconnect; return the time on the loop's clock."""
        left = asyncio.get_running_loop().time()
        self.writer.close()
        await self.writer.wait_closed()
        return left


async def noticed_within(seconds: float, client: Client, mesh: Mesh, event: Any) -> None:
    """Disconnect, and check that `event` occurs in time.

    The delays of the event loop and of NATS do not count: they are measured meanwhile.
    """
    loop = asyncio.get_running_loop()
    late, has_occurred = 0.0, False

    async def measure() -> None:
        nonlocal late
        while not has_occurred:
            before = loop.time()
            await asyncio.sleep(0.005)
            await mesh.flush(60)
            late = max(late, loop.time() - before - 0.005)

    meter = asyncio.create_task(measure())
    try:
        left = await client.leave()
        await event
        took, has_occurred = loop.time() - left, True
        await meter  # the delay of the event may be that of the measurement in progress
    finally:
        await end(meter)
    assert took <= seconds + 10 * late, f"noticed after {took * 1e3:.0f} ms"


@pytest.mark.parametrize("behaviour", [silence, prefill, hang])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
async def test_engine_stops_when_the_client_disconnects(
    gateway: Served, node: FakeNode, behaviour: Any, stream: bool, keyed: bool
) -> None:
    engine = await node.engine("alpha", behaviour)
    client = Client(gateway, {"idempotency-key": "k"} if keyed else None, stream=stream)
    reader = await client.send()
    await engine.until(lambda: len(engine.requests) == 1)
    if behaviour is hang and stream:
        await reader.readuntil(b"Hello")
    await noticed_within(NOTICED_S, client, node.mesh, engine.until(lambda: len(engine.cancelled) == 1))
    assert engine.cancelled == [engine.requests[0].request.request_id]


@pytest.mark.parametrize("comments", [False, True])
async def test_queue_and_load_end_when_the_last_client_disconnects(node: FakeNode, serve: ServeFn, comments: bool) -> None:
    async with serve(waking_comment_after=0.1 if comments else 30.0, waking_comment_interval=0.05) as served:
        await until_listed(served, CARDS)
        starting = await node.engine("alpha", ready=False)
        first, second = Client(served, stream=True), Client(served, stream=True)
        readers = [await first.send(), await second.send()]
        await node.until_demand(lambda: any(d.waiting == 2 for d in node.demand))
        if comments:
            await readers[1].readuntil(b": waking alpha")
        await first.leave()
        await until(lambda: _waiting(served, 1))
        await noticed_within(NOTICED_S, second, node.mesh, node.until_demand(lambda: node.demand[-1].waiting == 0))
        starting.state = InstanceState.READY
        await node.announce()
        third = await served.http.post(URL, json=chat())
        assert third.status_code == 200
        assert len(starting.requests) == 1


async def _waiting(served: Served, count: int) -> bool:
    text = (await served.http.get("/metrics")).text
    return f'thaw_queue_length{{gen_ai_request_model="alpha"}} {count:.1f}' in text


# Requests that an engine cannot honour.

UNSUPPORTED: list[dict[str, Any]] = [
    {"functions": [{"name": "f"}]},
    {"allowed_token_ids": [1]},
    {"modalities": ["audio"]},
    {"web_search_options": {}},
    {"prediction": {"type": "content", "content": "x"}},
    {"bad_words": ["x"]},
    {"skip_special_tokens": False},
]


@pytest.mark.parametrize("fields", UNSUPPORTED)
@pytest.mark.parametrize("stream", [False, True])
async def test_unsupported_parameter_is_refused_before_the_first_byte(
    gateway: Served, fields: dict[str, Any], stream: bool
) -> None:
    answer = await gateway.http.post(URL, json=chat(stream=stream, **fields))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", next(iter(fields)))


async def test_refused_stream_has_the_status_of_the_engine(gateway: Served, node: FakeNode) -> None:
    from shared.errors import UnsupportedParameter

    async def refuse(run: Run) -> None:
        await run.fail(UnsupportedParameter("shoe_size is not supported by this engine", param="shoe_size"))

    await node.engine("alpha", refuse)
    async with openai.AsyncOpenAI(base_url=f"{gateway.base}/v1", api_key="none", max_retries=0) as client:
        began = time.monotonic()
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="alpha", messages=[{"role": "user", "content": "x"}], stream=True, extra_body={"shoe_size": 43}
            )
        assert time.monotonic() - began < 30
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "shoe_size")
