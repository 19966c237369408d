"""The gateway refuses hostile clients' expensive requests, and keeps serving."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from uvicorn.config import WS_PROTOCOLS

from services.gateway.authorization import hash_key
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.support.fake_engine import FakeNode, Run

URL = "/v1/chat/completions"
FORM = "multipart/form-data; boundary=b"
REPEATED = b"--b\r\n" + b"content-disposition:" * 300_000 + b"\r\n--b--\r\n"


@pytest.mark.parametrize(
    ("path", "kind", "body", "status", "code"),
    [
        ("/v1/rerank", FORM, REPEATED, 404, "not_found"),
        (URL, "application/json", b'{"model":"alpha","messages":[' + b"null," * 1_000_000 + b"null]}", 413, "payload_too_large"),
        (URL, FORM, b'{"model":"alpha","messages":[' + b"null," * 1_000_000 + b"null]}", 413, "payload_too_large"),
        (URL, "application/json", b'{"model":"alpha","messages":[' + b"null," * 20_000 + b"null]}", 400, "invalid_request"),
        ("/v1/completions", "application/json", json.dumps({"model": "alpha", "prompt": ["a"] * 50_000, "n": 128}).encode(), 400, "invalid_request"),
        ("/v1/completions", "application/json", json.dumps({"model": "alpha", "prompt": ["a"] * 2_000, "n": 128}).encode(), 400, "invalid_request"),
    ],
)  # fmt: skip
async def test_expensive_request_is_refused(
    gateway: Served, node: FakeNode, path: str, kind: str, body: bytes, status: int, code: str
) -> None:
    await node.engine("alpha")
    answer = await gateway.http.post(path, content=body, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text[:500]
    assert (await gateway.http.post(URL, json=chat())).status_code == 200


@pytest.mark.parametrize("key", ["", "sk-made-up"], ids=["without a key", "with a key that does not exist"])
async def test_open_requests_are_bounded_in_bytes(node: FakeNode, serve: ServeFn, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with serve(max_open_bytes_per_key=1024 * 1024) as gateway:
        await until_listed(gateway, CARDS)
        large: dict[str, Any] = chat(messages=[{"role": "user", "content": "x" * 600_000}], max_tokens=1)
        first = asyncio.create_task(gateway.http.post(URL, json=large))
        await node.until_demand(lambda: any(d.model == "alpha" for d in node.demand))
        second = await gateway.http.post(URL, json=large, headers=headers)
        assert (second.status_code, second.json()["error"]["code"]) == (429, "queue_full")
        assert int(second.headers["retry-after"]) >= 1
        assert 'thaw_requests_rejected_total{thaw_key="",thaw_reason="open_bytes"} 1.0' in (await gateway.http.get("/metrics")).text
        too_large = chat(messages=[{"role": "user", "content": "x" * 1_100_000}])
        assert (await gateway.http.post(URL, json=too_large)).status_code == 413
        await node.engine("alpha")
        assert (await first).status_code == 200

        async def taken() -> bool:
            return (await gateway.http.post(URL, json=large)).status_code == 200

        await until(taken)


@pytest.mark.parametrize("sent", [b"{", b""])
async def test_incomplete_body_times_out_with_408(node: FakeNode, serve: ServeFn, sent: bytes) -> None:
    async with serve(body_timeout=0.3) as gateway:
        await until_listed(gateway, CARDS)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.gateway_port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
            + sent
        )
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"request_timeout"' in answer


async def talk(served: Served, *parts: bytes, within: float = 18.0) -> bytes:
    """Send bytes on a new connection; return the gateway's output until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.settings.gateway_port)
    try:
        async with asyncio.timeout(within):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
LAST = GET + b"connection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ((GET + b"x-y: " + b"z" * 40_000 + b"\r\n\r\n",), 431, b"headers_too_large"),
        ((GET + b"x-y: ", *[b"z" * 10_000] * 5), 431, b"headers_too_large"),
        ((b"GET /" + b"z" * 40_000 + b" HTTP/1.1\r\n\r\n",), 431, b"headers_too_large"),
        ((GET + b"x-y: z\r\n" * 120 + b"\r\n",), 431, b"headers_too_large"),
        ((b"nonsense\r\n\r\n",), 400, b"invalid_request"),
        ((GET + b"\r\n", LAST), 200, b"uptime_s"),
    ],
)
async def test_request_heads_are_bounded(gateway: Served, parts: tuple[bytes, ...], status: int, code: bytes) -> None:
    answer = await talk(gateway, *parts)
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:300]
    assert code in answer
    if status != 200:
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error.keys() == {"message", "type", "param", "code"}


async def test_slow_heads_and_idle_connections_are_closed(serve: ServeFn, node: FakeNode) -> None:
    async with serve(header_timeout=0.3, idle_timeout=1) as gateway:
        assert await talk(gateway) == b"", "a connection that says nothing"
        assert (await talk(gateway, b"GET /health HT")).startswith(b"HTTP/1.1 408")
        assert (await talk(gateway, GET + b"\r\n")).startswith(b"HTTP/1.1 200"), "kept open between requests for a second"
        assert (await talk(gateway, GET + b"\r\n", b"\r\n")).startswith(b"HTTP/1.1 200")


async def test_pipelined_requests_are_bounded(gateway: Served) -> None:
    few = await talk(gateway, (GET + b"\r\n") * 8 + LAST)
    assert few.count(b"HTTP/1.1 200") == 9
    assert (await talk(gateway, (GET + b"\r\n") * 2000 + LAST)).count(b"HTTP/1.1 200") < 100


async def test_connections_are_bounded(serve: ServeFn, node: FakeNode) -> None:
    for limits, status in (({"max_connections_per_address": 3}, 429), ({"max_connections": 3}, 503)):
        async with serve(**limits) as gateway:
            port = gateway.settings.gateway_port
            open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]  # the fixture has one more
            refused = await talk(gateway)
            assert refused.startswith(b"HTTP/1.1 %d" % status), refused[:200]
            assert b"retry-after: 1" in refused
            for _, writer in open_ones:
                writer.close()
                await writer.wait_closed()

            async def taken(served: Served = gateway) -> bool:
                return (await talk(served, LAST)).startswith(b"HTTP/1.1 200")

            await until(taken)


async def test_client_that_does_not_read_is_disconnected(serve: ServeFn, node: FakeNode) -> None:
    async def endless(run: Run) -> None:
        await run.start()
        while not run.engine.cancelled:  # as an engine does; the fake one only records the command
            await run.text("x" * 65536)

    async with serve(write_timeout=0.3, stream_buffer_bytes=1024 * 1024) as gateway:
        await until_listed(gateway, CARDS)
        engine = await node.engine("alpha", endless)
        body = json.dumps(chat(stream=True)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.gateway_port)
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (URL.encode(), len(body), body)
        )
        await engine.until(lambda: bool(engine.cancelled))
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                while await reader.read(2**20):
                    pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


PLAIN = {"content-type": "text/plain"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/health", {"host": "evil.example"}, 403),
        ("GET", "/v1/models", {"host": "127.0.0.1.evil.example:8080"}, 403),
        ("GET", "/v1/models", {"host": "localhost.evil.example"}, 403),
        ("GET", "/health", {"host": "localhost:1234"}, 200),
        ("GET", "/health", {"host": "[::1]:1234"}, 200),
        ("GET", "/health", {"host": "127.0.0.2"}, 200),
        ("GET", "/health", {"host": "thaw.localhost"}, 200),
        ("POST", URL, {"origin": "https://evil.example"}, 403),
        ("POST", URL, {"origin": "null"}, 403),
        ("POST", "/admin/v1/keys", {"origin": "https://evil.example"}, 403),
        ("DELETE", "/admin/v1/models/alpha", {"origin": "https://evil.example"}, 403),
        ("POST", URL, {"origin": "http://localhost:7", "host": "localhost:7"}, 200),
        ("POST", URL, PLAIN, 415),
        ("POST", URL, {"content-type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/admin/v1/keys", PLAIN, 415),
        ("POST", URL, {"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
async def test_a_web_page_cannot_drive_a_local_mesh(
    gateway: Served, node: FakeNode, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    await node.engine("alpha")
    content = json.dumps(chat()).encode() if method == "POST" else b""
    answer = await gateway.http.request(method, path, headers=headers, content=content)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["message"]


async def test_hosts_and_origins_may_be_allowed(serve: ServeFn, node: FakeNode) -> None:
    async with serve(allowed_hosts="models.example", cors_origins="https://page.example") as gateway:
        await until_listed(gateway, CARDS)
        await node.engine("alpha")
        ours = {"host": "models.example", "origin": "https://page.example"}
        assert (await gateway.http.post(URL, json=chat(), headers=ours)).status_code == 200
        assert (await gateway.http.post(URL, json=chat(), headers=ours | {"host": "other.example"})).status_code == 403
        assert (await gateway.http.post(URL, json=chat(), headers=ours | {"origin": "https://other.example"})).status_code == 403


async def test_host_header_is_checked_by_the_published_address(serve: ServeFn) -> None:
    """It listens on all addresses of its container.

    Other containers reach it by a name without a dot.
    """
    async with serve(gateway_host="0.0.0.0", published_address="127.0.0.1") as gateway:
        statuses = {
            host: (await gateway.http.get("/health", headers={"host": host})).status_code
            for host in ("localhost:8080", "thaw-gateway:8080", "evil.example", "172.18.0.5:8080")
        }
        assert statuses == {"localhost:8080": 200, "thaw-gateway:8080": 200, "evil.example": 403, "172.18.0.5:8080": 403}
        assert (await gateway.http.get("/metrics")).status_code == 200
    async with serve(gateway_host="127.0.0.1", published_address="0.0.0.0", admin_key="root") as gateway:
        assert (await gateway.http.get("/health", headers={"host": "any.example"})).status_code == 200
        assert (await gateway.http.get("/metrics")).status_code == 401


async def test_access_to_metrics_and_openapi_follows_the_settings(serve: ServeFn, node: FakeNode) -> None:
    key = {"authorization": "Bearer sk-one"}
    async with serve(metrics_access="key", openapi_access="off", api_keys=hash_key("sk-one")) as gateway:
        assert (await gateway.http.get("/openapi.json", headers=key)).status_code == 404
        assert (await gateway.http.get("/metrics")).status_code == 401
        assert (await gateway.http.get("/metrics", headers={"authorization": "Bearer sk-two"})).status_code == 401
        assert (await gateway.http.get("/metrics", headers=key)).status_code == 200
    async with serve(gateway_host="0.0.0.0", openapi_access="open", admin_key="root") as gateway:
        assert (await gateway.http.get("/metrics")).status_code == 401
        assert (await gateway.http.get("/metrics", headers={"authorization": "Bearer root"})).status_code == 200
        assert (await gateway.http.get("/openapi.json")).status_code == 200
        assert (await gateway.http.get("/health", headers={"host": "any.example"})).status_code == 200


class Taken(asyncio.Protocol):
    """The protocol of a WebSocket library, as uvicorn finds one that is installed."""

    def __init__(self, **options: Any) -> None:
        """Ignore uvicorn's options."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def test_upgrades_to_other_protocols_are_ignored(
    serve: ServeFn, node: FakeNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection would no longer count for the limits, and never leave them."""
    monkeypatch.setitem(WS_PROTOCOLS, "auto", f"{__name__}:Taken")
    async with serve() as gateway:
        answer = await talk(gateway, GET + b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert "WebSocket" not in caplog.text
