"""Bodies that exceed a NATS message, on routes that are translated for engines without them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from shared.contracts import subjects
from shared.errors import BodyLost
from shared.messaging.streams import catalog_bucket
from tests.integration.gateway.clients import anthropic_client, ollama_client, openai_client
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, until, until_listed
from tests.integration.gateway.held_bodies import all_closed, open_bodies, read_part, received
from tests.integration.gateway.large_sizes import MIB, SMALL_PAYLOAD
from tests.support.fake_engine import FakeNode, Run, card_of

ollama = pytest.importorskip("ollama")
MAX_PAYLOAD = SMALL_PAYLOAD
SERVED = ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
PLAIN = card_of("plain", engine="vllm")
SERVES = card_of("serves", engine="vllm", routes=SERVED)
PICTURE = b"\xff\xd8\xff" + random.Random(5).randbytes(9 * MIB)
"""Begins as a JPEG; in base64 it exceeds a message of the test's NATS server."""
ENCODED = base64.b64encode(PICTURE).decode()
URL = f"data:image/jpeg;base64,{ENCODED}"
QUESTION = "Is she née?"
PATHS = ("/v1/messages", "/v1/responses", "/api/chat", "/api/generate")


def asking(path: str, data: str = ENCODED, question: str = QUESTION, **fields: Any) -> dict[str, Any]:
    """Return a request of the API with a question about an image."""
    source = {"type": "base64", "media_type": "image/jpeg", "data": data}
    blocks = [{"type": "text", "text": question}, {"type": "image", "source": source}]
    parts = [{"type": "input_text", "text": question}, {"type": "input_image", "image_url": f"data:image/jpeg;base64,{data}"}]
    by_path: dict[str, dict[str, Any]] = {
        "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": blocks}]},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": blocks}]},
        "/v1/responses": {"input": [{"role": "user", "content": parts}]},
        "/api/chat": {"messages": [{"role": "user", "content": question, "images": [data]}], "stream": False},
        "/api/generate": {"prompt": question, "images": [data], "stream": False},
    }
    return {"model": "plain"} | by_path[path] | fields


async def ask_messages(gateway: Served) -> str:
    async with anthropic_client(gateway) as client:
        return str((await client.messages.create(**asking("/v1/messages"))).content[0].text)


async def ask_responses(gateway: Served) -> str:
    async with openai_client(gateway) as client:
        return str((await client.responses.create(**asking("/v1/responses"))).output_text)


@contextlib.asynccontextmanager
async def ollama_session(gateway: Served) -> AsyncIterator[Any]:
    client = ollama_client(gateway)
    try:
        yield client
    finally:
        await client._client.aclose()


async def ask_chat(gateway: Served) -> str:
    message = {"role": "user", "content": QUESTION, "images": [PICTURE]}
    async with ollama_session(gateway) as client:
        return str((await client.chat("plain", [message])).message.content)


async def ask_generate(gateway: Served) -> str:
    async with ollama_session(gateway) as client:
        return str((await client.generate("plain", QUESTION, images=[PICTURE])).response)


def completing(node: FakeNode, bodies: list[Any]) -> Callable[[Run], Awaitable[None]]:
    """Read the body that the host sends to its engine, then answer "Oui" as a chat completion."""

    async def answer(run: Run) -> None:
        bodies.append(json.loads(await received(node.mesh, run)))
        choice = {"index": 0, "message": {"role": "assistant", "content": "Oui"}, "finish_reason": "stop"}
        await run.respond("application/json", json.dumps({"choices": [choice]}).encode())
        await run.close()

    return answer


@pytest.fixture
async def http(gateway: Served, node: FakeNode) -> httpx.AsyncClient:
    await register(gateway, node)
    return gateway.http


async def register(gateway: Served, node: FakeNode) -> None:
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    for card in (PLAIN, SERVES):
        await bucket.put(subjects.token(card.name), card.model_dump_json().encode())
    await until_listed(gateway, (*CARDS, PLAIN, SERVES))


@pytest.mark.parametrize("ask", [ask_messages, ask_responses, ask_chat, ask_generate])
async def test_a_large_image_reaches_the_engine_unchanged(
    gateway: Served, http: httpx.AsyncClient, node: FakeNode, ask: Callable[[Served], Awaitable[str]]
) -> None:
    bodies: list[Any] = []
    engine = await node.engine("plain", completing(node, bodies))
    assert await ask(gateway) == "Oui"
    [message] = bodies[0]["messages"]
    assert message["content"] == [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": URL}}]
    run = engine.requests[0].request
    assert (run.kind, run.endpoint) == ("infer_held", "chat")
    assert len(json.dumps(run.body)) < 100_000
    await all_closed(gateway)


@pytest.mark.parametrize("path", SERVED)
async def test_an_engine_with_the_route_receives_the_large_body(http: httpx.AsyncClient, node: FakeNode, path: str) -> None:
    bodies: list[Any] = []
    engine = await node.engine("serves", completing(node, bodies))
    asked = asking(path, model="serves", custom=[1.0, "né"])
    assert (await http.post(path, json=asked)).status_code == 200
    assert bodies == [asked]
    assert engine.requests[0].request.route == path


def error_of(path: str, answer: httpx.Response) -> tuple[Any, str]:
    """Return the kind and the text of an error in the API's form; Ollama's has no kind."""
    body = answer.json()
    if path.startswith("/api/"):
        assert body.keys() == {"error"}
        return None, body["error"]
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        return body["error"]["type"], body["error"]["message"]
    return body["error"]["code"], body["error"]["message"]


KINDS = {
    "/v1/messages": "request_too_large",
    "/v1/messages/count_tokens": "request_too_large",
    "/v1/responses": "payload_too_large",
}


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
async def test_other_large_bodies_are_refused_in_the_form_of_the_api(
    gateway: Served, http: httpx.AsyncClient, node: FakeNode, path: str
) -> None:
    """An image for a model that takes text only, long text in base64, and long prose."""
    engine = await node.engine("plain")
    texts = [asking(path, "AA", text * (3 * MIB)) for text in ("QUJD", "word ")]
    for asked in (asking(path, model="alpha"), *texts):
        answer = await http.post(path, json=asked)
        assert (answer.status_code, error_of(path, answer)[0]) == (413, KINDS.get(path))
        assert "exceeds the limit of" in error_of(path, answer)[1]
    assert not engine.requests
    await all_closed(gateway)


async def test_bodies_over_the_limit_are_refused_in_the_form_of_the_api(node: FakeNode, serve: ServeFn) -> None:
    async with serve(max_body_bytes=10 * MIB) as gateway:
        await register(gateway, node)
        for path in (*PATHS, "/v1/messages/count_tokens"):
            for model in ("plain", "serves"):
                answer = await gateway.http.post(path, json=asking(path, model=model))
                assert (answer.status_code, error_of(path, answer)[0]) == (413, KINDS.get(path))
                assert str(10 * MIB) in error_of(path, answer)[1]
        async with anthropic_client(gateway) as client:
            with pytest.raises(anthropic.RequestTooLargeError):
                await client.messages.create(**asking("/v1/messages"))
        async with openai_client(gateway) as responding:
            with pytest.raises(openai.APIStatusError, match=str(10 * MIB)):
                await responding.responses.create(**asking("/v1/responses"))
        with pytest.raises(ollama.ResponseError, match=str(10 * MIB)) as caught:
            await ask_chat(gateway)
        assert caught.value.status_code == 413
        await all_closed(gateway)


async def test_other_media_than_images_are_refused(gateway: Served, http: httpx.AsyncClient, node: FakeNode) -> None:
    await node.engine("plain")
    asked = asking("/v1/messages")
    asked["messages"][0]["content"][1]["source"]["media_type"] = "text/html"
    answer = await http.post("/v1/messages", json=asked)
    assert (answer.status_code, error_of("/v1/messages", answer)[0]) == (400, "invalid_request_error")
    assert "media_type" in error_of("/v1/messages", answer)[1]
    answer = await http.post("/api/chat", json=asking("/api/chat", f"data:text/html;base64,{ENCODED}"))
    assert (answer.status_code, "images[0]" in answer.json()["error"]) == (400, True)
    await all_closed(gateway)


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages of the engine"])
async def test_a_client_that_leaves_frees_its_body(gateway: Served, http: httpx.AsyncClient, node: FakeNode, path: str) -> None:
    async def wait(run: Run) -> None:
        await run.cancelled.wait()

    path, _, by_engine = path.partition(" ")
    model = "serves" if by_engine else "plain"
    engine = await node.engine(model, wait)
    leaving = asyncio.create_task(http.post(path, json=asking(path, model=model)))
    await engine.until(lambda: len(engine.requests) == 1)
    held = engine.requests[0].request.held
    assert held is not None
    leaving.cancel()
    await engine.until(lambda: len(engine.cancelled) == 1)
    await all_closed(gateway)
    with pytest.raises(BodyLost):
        await read_part(node.mesh, held)


async def test_clients_that_leave_during_their_uploads_free_their_bodies(gateway: Served, http: httpx.AsyncClient) -> None:
    directory = gateway.settings.state / "gateway" / "bodies"

    async def have_begun() -> bool:
        return await asyncio.to_thread(open_bodies, directory) == len(PATHS)

    writers = []
    for path in PATHS:
        content = json.dumps(asking(path)).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.gateway_port)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content[: 10 * MIB])
        await writer.drain()
        writers.append(writer)
    await until(have_begun)
    for writer in writers:
        writer.close()
    await all_closed(gateway)


async def test_a_response_to_a_large_image_is_not_stored(gateway: Served, http: httpx.AsyncClient, node: FakeNode) -> None:
    """Its stored conversation would lack the image."""
    await node.engine("plain", completing(node, []))
    async with openai_client(gateway) as client:
        response = await client.responses.create(**asking("/v1/responses", store=True))
        assert response.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


@pytest.mark.parametrize("path", PATHS[:3])
async def test_an_idempotent_request_is_generated_once(http: httpx.AsyncClient, node: FakeNode, path: str) -> None:
    engine = await node.engine("plain", completing(node, []))
    answers = [await http.post(path, json=asking(path), headers={"idempotency-key": "k"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert answers[0].json().get("id") == answers[1].json().get("id")
    assert len(engine.requests) == 1
    other = await http.post(path, json=asking(path, ENCODED[:-8] + "AAAAAAAA"), headers={"idempotency-key": "k"})
    assert other.status_code == 422
