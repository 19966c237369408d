"""Bodies that exceed a NATS message, from clients through a gateway to fake hosts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from shared.contracts import subjects
from shared.contracts.request_body import BODY_PART_BYTES
from shared.errors import BodyLost, EngineFailed, InvalidRequest
from shared.messaging import Mesh
from shared.messaging.streams import catalog_bucket
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.integration.gateway.held_bodies import all_closed, open_bodies, read_part, received
from tests.integration.gateway.large_sizes import MIB, SMALL_PAYLOAD
from tests.support.fake_engine import FakeEngine, FakeNode, Run, card_of

MAX_PAYLOAD = SMALL_PAYLOAD
ROUTE = "/v1/audio/transcriptions"
OWN = card_of("own", engine="vllm", routes=(ROUTE, "/v1/rerank"))
SOUND = random.Random(1).randbytes(20 * MIB)
"""More than a message of the test's NATS server."""
IMAGE = "data:image/png;base64," + "QUJD" * (3 * MIB)


def answering(mesh: Mesh, bodies: list[bytes]) -> Callable[[Run], Awaitable[None]]:
    async def answer(run: Run) -> None:
        bodies.append(await received(mesh, run))
        await run.respond("application/json", b'{"text": "%b"}' % hashlib.sha256(bodies[-1]).hexdigest().encode())
        await run.close()

    return answer


async def bytes_in_files(http: httpx.AsyncClient) -> float:
    """Return the gateway's metric of the bytes that it holds in files."""
    lines = (await http.get("/metrics")).text.splitlines()
    (line,) = [line for line in lines if line.startswith('thaw_requests_bytes{thaw_place="file"}')]
    return float(line.rpartition(" ")[2])


async def register(gateway: Served, node: FakeNode) -> None:
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    await bucket.put(subjects.token(OWN.name), OWN.model_dump_json().encode())
    await until_listed(gateway, (*CARDS, OWN))


@pytest.fixture
async def http(gateway: Served, node: FakeNode) -> httpx.AsyncClient:
    await register(gateway, node)
    return gateway.http


def upload(http: httpx.AsyncClient, sound: bytes = SOUND, **fields: str) -> httpx.Request:
    return http.build_request("POST", ROUTE, data={"model": "own"} | fields, files={"file": ("a.wav", sound, "audio/wav")})


async def send(http: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    await request.aread()
    return await http.send(request)


def with_image(url: str = IMAGE, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "né?"}, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
    return {"model": "own", "messages": [{"role": "user", "content": content}]} | fields


async def test_a_large_form_reaches_the_engine_unchanged(gateway: Served, http: httpx.AsyncClient, node: FakeNode) -> None:
    bodies: list[bytes] = []
    shown: list[float] = []

    async def answer(run: Run) -> None:
        shown.append(await bytes_in_files(http))
        await answering(node.mesh, bodies)(run)

    engine = await node.engine("own", answer)
    request = upload(http, language="fr")
    response = await send(http, request)
    assert response.json() == {"text": hashlib.sha256(request.content).hexdigest()}
    assert bodies == [request.content]
    assert shown == [len(request.content)]
    asked = engine.requests[0].request
    assert (asked.kind, asked.data, asked.body) == ("infer_held", None, {})
    assert asked.content_type == request.headers["content-type"]
    await all_closed(gateway)
    assert await bytes_in_files(http) == 0


async def test_a_chat_with_large_images_reaches_the_engine_unchanged(
    gateway: Served, http: httpx.AsyncClient, node: FakeNode
) -> None:
    bodies: list[bytes] = []
    engine = await node.engine("own", answering(node.mesh, bodies))
    asked = with_image()
    asked["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": IMAGE[::-1]}})
    assert (await http.post("/v1/chat/completions", json=asked)).status_code == 200
    assert json.loads(bodies[0]) == asked
    run = engine.requests[0].request
    assert run.held is not None
    assert len(run.held.pieces) == 2
    assert len(json.dumps(run.body)) < 200_000
    assert run.body["messages"][0]["content"][0] == {"type": "text", "text": "né?"}
    await all_closed(gateway)


async def test_escaped_slashes_stay_escaped(http: httpx.AsyncClient, node: FakeNode) -> None:
    """Base64 in the form in which PHP encodes it."""
    bodies: list[bytes] = []
    await node.engine("own", answering(node.mesh, bodies))
    url = "data:image/png;base64," + "QU/D" * (3 * MIB)
    body = json.dumps(with_image(url)).replace("/", "\\/")
    answer = await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert json.loads(bodies[0]) == with_image(url)


async def test_a_route_of_the_engine_takes_large_json(http: httpx.AsyncClient, node: FakeNode) -> None:
    bodies: list[bytes] = []
    await node.engine("own", answering(node.mesh, bodies))
    asked = {"model": "own", "query": {"image": IMAGE}, "documents": ["x"]}
    assert (await http.post("/v1/rerank", json=asked)).status_code == 200
    assert json.loads(bodies[0]) == asked


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", chat("own") | {"messages": [{"role": "user", "content": "word " * (3 * MIB)}]}),
        ("/v1/chat/completions", chat("own") | {"messages": [{"role": "user", "content": "QUJD" * (3 * MIB)}]}),
        ("/v1/chat/completions", chat("own") | {"user": "QUJD" * (3 * MIB)}),
        ("/v1/completions", {"model": "own", "prompt": "QUJD" * (3 * MIB)}),
        ("/v1/chat/completions", with_image() | {"model": "alpha"}),
        ("/v1/embeddings", {"model": "vectors", "input": IMAGE}),
    ],
    ids=["prose", "text", "field", "completion", "builtin", "embedding"],
)
async def test_other_large_bodies_are_refused(gateway: Served, http: httpx.AsyncClient, path: str, asked: Any) -> None:
    answer = await http.post(path, json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
    assert "exceeds the limit of" in answer.json()["error"]["message"]
    await all_closed(gateway)


async def test_invalid_large_bodies_are_refused(gateway: Served, http: httpx.AsyncClient) -> None:
    answer = await send(http, upload(http, model=""))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    broken = json.dumps(with_image())[:-2]
    answer = await http.post("/v1/chat/completions", content=broken, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    answer = await http.post("/v1/chat/completions", json=with_image(model="none"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    await all_closed(gateway)


async def test_bodies_beyond_the_bounds_are_refused_before_they_are_read(node: FakeNode, serve: ServeFn) -> None:
    async with serve(max_held_bytes=30 * MIB, max_held_bytes_per_key=30 * MIB, max_body_bytes=25 * MIB) as gateway:
        await register(gateway, node)
        http, go = gateway.http, asyncio.Event()

        async def wait(run: Run) -> None:
            await go.wait()
            await run.respond("application/json", b"{}")
            await run.close()

        engine = await node.engine("own", wait)
        first = asyncio.create_task(send(http, upload(http)))
        await engine.until(lambda: len(engine.requests) == 1)
        refused = await send(http, upload(http))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert str(30 * MIB) in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers
        too_large = await send(http, upload(http, SOUND * 2))
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "payload_too_large")
        go.set()
        assert (await first).status_code == 200
        assert (await send(http, upload(http))).status_code == 200
    async with serve(max_held_bytes=0) as gateway:
        await register(gateway, node)
        answer = await send(gateway.http, upload(gateway.http))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


async def test_a_chunked_upload_is_bounded_too(node: FakeNode, serve: ServeFn) -> None:
    async with serve(max_held_bytes=12 * MIB) as gateway:
        await register(gateway, node)
        request = upload(gateway.http)
        await request.aread()

        async def parts() -> AsyncIterator[bytes]:
            for at in range(0, len(request.content), MIB):
                yield request.content[at : at + MIB]

        headers = {"content-type": request.headers["content-type"]}
        answer = await gateway.http.post(ROUTE, content=parts(), headers=headers)
        assert answer.status_code in (413, 429)
        await all_closed(gateway)


async def test_a_client_that_leaves_frees_its_body(gateway: Served, http: httpx.AsyncClient, node: FakeNode) -> None:
    async def wait(run: Run) -> None:
        await run.cancelled.wait()

    engine = await node.engine("own", wait)
    leaving = asyncio.create_task(send(http, upload(http)))
    await engine.until(lambda: len(engine.requests) == 1)
    held = engine.requests[0].request.held
    assert held is not None
    leaving.cancel()
    await engine.until(lambda: len(engine.cancelled) == 1)
    await all_closed(gateway)
    with pytest.raises(BodyLost):
        await read_part(node.mesh, held)


async def test_a_client_that_leaves_during_its_upload_frees_its_body(gateway: Served, http: httpx.AsyncClient) -> None:
    request = upload(http)
    await request.aread()
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.gateway_port)
    head = f"POST {ROUTE} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(request.content)}\r\n"
    writer.write(f"{head}content-type: {request.headers['content-type']}\r\n\r\n".encode() + request.content[: 12 * MIB])
    await writer.drain()
    directory = gateway.settings.state / "gateway" / "bodies"

    async def has_begun() -> bool:
        return await asyncio.to_thread(open_bodies, directory) == 1

    await until(has_begun)
    writer.close()
    await all_closed(gateway)


async def test_a_slow_upload_ends_with_the_time_of_a_body(node: FakeNode, serve: ServeFn) -> None:
    async with serve(body_timeout=1.0) as gateway:
        await register(gateway, node)
        request = upload(gateway.http)
        await request.aread()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.gateway_port)
        head = f"POST {ROUTE} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(request.content)}\r\n"
        writer.write(f"{head}content-type: {request.headers['content-type']}\r\n\r\n".encode() + request.content[: 12 * MIB])
        await writer.drain()
        assert b" 408 " in await reader.readline()
        writer.close()
        await all_closed(gateway)


async def test_parts_of_unknown_bodies_and_places_are_typed_errors(http: httpx.AsyncClient, node: FakeNode) -> None:
    read = asyncio.Event()

    async def wait(run: Run) -> None:
        await read.wait()
        await run.respond("application/json", b"{}")
        await run.close()

    engine = await node.engine("own", wait)
    request = upload(http)
    asking = asyncio.create_task(send(http, request))
    await engine.until(lambda: len(engine.requests) == 1)
    held = engine.requests[0].request.held
    assert held is not None
    part = await read_part(node.mesh, held, 1000)
    assert len(part) == BODY_PART_BYTES
    assert request.content[1000:].startswith(part)
    with pytest.raises(BodyLost):
        await read_part(node.mesh, held.model_copy(update={"body_id": "0" * 32}))
    with pytest.raises(InvalidRequest):
        await read_part(node.mesh, held, held.size_bytes)
    read.set()
    assert (await asking).status_code == 200


async def test_a_body_is_sent_again_when_its_engine_dies(gateway: Served, http: httpx.AsyncClient, node: FakeNode) -> None:
    bodies: list[bytes] = []

    async def dies_once(run: Run) -> None:
        if len(run.engine.requests) == 1:
            held = run.request.held
            assert held is not None
            await read_part(node.mesh, held)
            await run.fail(EngineFailed("it ended"), engine_lost=True)
        else:
            await answering(node.mesh, bodies)(run)

    engine = await node.engine("own", dies_once)
    request = upload(http)
    assert (await send(http, request)).status_code == 200
    assert bodies == [request.content]
    assert len(engine.requests) == 2
    await all_closed(gateway)


async def test_an_idempotent_upload_is_generated_once(http: httpx.AsyncClient, node: FakeNode) -> None:
    engine = await node.engine("own", answering(node.mesh, []))
    request = upload(http)
    await request.aread()
    headers = {"content-type": request.headers["content-type"], "idempotency-key": "k"}
    answers = [await http.post(ROUTE, content=request.content, headers=headers) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert len(engine.requests) == 1
    other = request.content.replace(SOUND[:100], SOUND[100:200])
    answer = await http.post(ROUTE, content=other, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_a_gateway_that_takes_a_request_over_sends_its_own_copy(node: FakeNode, serve: ServeFn) -> None:
    """The first gateway ends before the host has read the body; the client repeats its request."""
    bodies: list[bytes] = []
    async with serve() as first, serve(idempotency_ttl=3600.0) as second:
        await register(first, node)
        await register(second, node)
        go = asyncio.Event()

        async def slow(run: Run) -> None:
            await go.wait()
            try:
                await answering(node.mesh, bodies)(run)
            except BodyLost as e:
                await run.fail(e)

        engine: FakeEngine = await node.engine("own", slow)
        request = upload(first.http)
        await request.aread()
        headers = {"content-type": request.headers["content-type"], "idempotency-key": "moved"}
        asking = asyncio.create_task(first.http.post(ROUTE, content=request.content, headers=headers))
        await engine.until(lambda: len(engine.requests) == 1)
        first.stop.set()
        assert (await asking).status_code == 503
        again = asyncio.create_task(second.http.post(ROUTE, content=request.content, headers=headers))
        await first.task
        go.set()
        answer = await again
        assert answer.status_code == 200, answer.text
        assert bodies[-1] == request.content
