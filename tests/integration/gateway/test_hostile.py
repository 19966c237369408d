"""Requests made to cost the gateway more than they cost their sender are refused, and it goes on serving."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.support.fake_engine import FakeNode

URL = "/v1/chat/completions"
FORM = "multipart/form-data; boundary=b"
REPEATED = b"--b\r\n" + b"content-disposition:" * 300_000 + b"\r\n--b--\r\n"


@pytest.mark.parametrize(
    ("path", "kind", "body", "status", "code"),
    [
        ("/v1/rerank", FORM, REPEATED, 404, "not_found"),
        (URL, "application/json", b'{"model":"alpha","messages":[' + b"null," * 1_000_000 + b"null]}", 413, "payload_too_large"),
        (URL, "application/json", b'{"model":"alpha","messages":[' + b"null," * 20_000 + b"null]}", 400, "invalid_request"),
        ("/v1/completions", "application/json", json.dumps({"model": "alpha", "prompt": ["a"] * 50_000, "n": 128}).encode(), 400, "invalid_request"),
        ("/v1/completions", "application/json", json.dumps({"model": "alpha", "prompt": ["a"] * 2_000, "n": 128}).encode(), 400, "invalid_request"),
    ],
)  # fmt: skip
async def test_what_costs_more_than_it_says_is_refused(
    gateway: Served, node: FakeNode, path: str, kind: str, body: bytes, status: int, code: str
) -> None:
    await node.engine("alpha")
    answer = await gateway.http.post(path, content=body, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text[:500]
    assert (await gateway.http.post(URL, json=chat())).status_code == 200


async def test_open_requests_are_bounded_in_bytes(node: FakeNode, serve: ServeFn) -> None:
    async with serve(max_open_bytes_per_key=1024 * 1024) as gateway:
        await until_listed(gateway, CARDS)
        large: dict[str, Any] = chat(messages=[{"role": "user", "content": "x" * 600_000}], max_tokens=1)
        first = asyncio.create_task(gateway.http.post(URL, json=large))
        await node.until_demand(lambda: any(d.model == "alpha" for d in node.demand))
        second = await gateway.http.post(URL, json=large)
        assert (second.status_code, second.json()["error"]["code"]) == (429, "queue_full")
        assert int(second.headers["retry-after"]) >= 1
        too_large = chat(messages=[{"role": "user", "content": "x" * 1_100_000}])
        assert (await gateway.http.post(URL, json=too_large)).status_code == 413
        await node.engine("alpha")
        assert (await first).status_code == 200

        async def taken() -> bool:
            return (await gateway.http.post(URL, json=large)).status_code == 200

        await until(taken)


async def test_a_body_that_does_not_come_is_given_up(node: FakeNode, serve: ServeFn) -> None:
    async with serve(body_timeout=0.3) as gateway:
        await until_listed(gateway, CARDS)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.gateway_port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"request_timeout"' in answer
