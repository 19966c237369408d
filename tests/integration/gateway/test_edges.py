"""All refusals in OpenAI's error shape; ids, keys and limits; gateway shutdown."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from nats.errors import Error as NatsError
from tokenizers import Tokenizer, models, pre_tokenizers

from services.gateway.adapters import prompt_length
from services.gateway.authorization import hash_key
from shared.contracts import subjects
from shared.contracts.admin import (
    ADMIN_REQUEST,
    AdminRequest,
    CancelPulls,
    ClusterView,
    ModelAwake,
    ModelPulled,
    ModelsAdded,
    PullModel,
    PullOptions,
    PullsCancelled,
    PullTarget,
)
from shared.contracts.base import Message
from shared.contracts.inference import ChoiceDelta, InferChunk, TokenLogprob, TopLogprob
from shared.contracts.models import ModelCard
from shared.errors import Conflict, DeadlineExceeded, ModelNotFound, NotFound, PullCancelled, ReplyLost, ThawError, Unavailable
from shared.messaging.streams import catalog_bucket
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.support.fake_engine import WORDS, FakeNode, Run, card_of, hang
from tests.support.servers import NatsServer

URL = "/v1/chat/completions"

FAULTS: list[tuple[dict[str, Any], int, str, str | None]] = [
    (chat("nobody"), 404, "model_not_found", "model"),
    ({"model": "alpha"}, 400, "invalid_request", "messages"),
    ({"messages": []}, 400, "invalid_request", "model"),
    (chat(temperature=3), 400, "invalid_request", "temperature"),
    (chat(messages=[{"role": "owl", "content": "x"}]), 400, "invalid_request", "messages[0].role"),
    (chat(messages=[]), 400, "invalid_request", "messages"),
    (chat(stop=["a", ""]), 400, "invalid_request", "stop[1]"),
    (chat(stop=["a"] * 17), 400, "invalid_request", "stop"),
    (chat(stream_options={"include_usage": True}), 400, "invalid_request", "stream_options"),
    (chat(top_logprobs=2), 400, "invalid_request", "top_logprobs"),
    (chat(logit_bias={"x": 1}), 400, "invalid_request", "logit_bias"),
    (chat(logit_bias={"31999": 1, "32000": 1}), 400, "invalid_request", "logit_bias"),
    (chat(logit_bias={"9" * 5000: 1}), 400, "invalid_request", "logit_bias"),
    (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "unsupported_parameter", "messages[0].content"),
    (chat(allowed_token_ids=[1]), 400, "unsupported_parameter", "allowed_token_ids"),
    (chat(tool_choice="required"), 400, "invalid_request", "tool_choice"),
    (chat(max_tokens=5000), 400, "context_length_exceeded", "max_tokens"),
    (chat("vectors"), 400, "invalid_request", "model"),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), FAULTS)
async def test_invalid_request_error_names_its_parameter(
    gateway: Served, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    answer = await gateway.http.post(URL, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert error.keys() == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]


async def test_inert_and_unknown_fields_are_accepted(gateway: Served, node: FakeNode) -> None:
    async def ignoring(run: Run) -> None:
        await run.start(ignored=("shoe_size",))
        await run.text(str(run.request.body["shoe_size"]))
        await run.finish(1)

    await node.engine("alpha", ignoring)
    body = chat(shoe_size=42, user="u", metadata={"a": "b"}, response_format={"type": "text"}, tool_choice="auto", store=False)
    answer = await gateway.http.post(URL, json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "42"
    assert answer.headers["x-thaw-ignored"] == "shoe_size"


async def test_token_ids_outside_the_vocabulary_are_refused_by_the_gateway(gateway: Served) -> None:
    answer = await gateway.http.post("/v1/completions", json={"model": "alpha", "prompt": [[1], [2, 32000]]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", URL, b"{", 400, "invalid_request"),
        ("POST", URL, b"[]", 400, "invalid_request"),
        ("POST", URL, b"", 400, "invalid_request"),
        ("POST", URL, b'{"model": "\xff"}', 400, "invalid_request"),
        ("GET", URL, b"", 405, "method_not_allowed"),
        ("POST", "/v1/nonsense", b"{}", 404, "not_found"),
        ("POST", "/v1/audio/transcriptions", b"--form", 404, "not_found"),
        ("POST", "/v1/models", b"", 404, "not_found"),
        ("POST", "/v1/rerank", b'{"model": "alpha"}', 404, "not_found"),
        ("POST", "/v1/rerank", b'{"model": "nobody"}', 404, "model_not_found"),
        ("GET", "/v1/nonsense", b"", 404, "not_found"),
        ("GET", "/nonsense", b"", 404, "not_found"),
        ("GET", "/admin/v1/explain", b"", 400, "invalid_request"),
        ("GET", "/admin/v1/traces/nothing", b"", 404, "not_found"),
        ("GET", "/admin/v1/cluster", b"", 503, "unreachable"),
    ],
)
async def test_every_refusal_has_the_openai_error_shape(
    gateway: Served, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    answer = await gateway.http.request(method, path, content=content)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code


async def test_a_body_over_the_limit(node: FakeNode, serve: ServeFn) -> None:
    async with serve(max_body_bytes=2048) as gateway:
        await until_listed(gateway, CARDS)
        big = chat(messages=[{"role": "user", "content": "x" * 3000}])
        assert (await gateway.http.post(URL, json=big)).status_code == 413

        async def parts() -> Any:
            for _ in range(3):
                yield b"x" * 1000

        answer = await gateway.http.post(URL, content=parts())
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "payload_too_large"


async def test_a_body_as_large_as_a_message_may_be_does_not_cost_the_connection(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    for size, status in ((8 * 1024 * 1024, 413), (7 * 1024 * 1024, 200)):
        body = chat(messages=[{"role": "user", "content": "x" * size}])
        assert (await gateway.http.post(URL, json=body)).status_code == status
    assert (await gateway.http.get("/ready")).status_code == 200


async def test_gateway_assigns_request_ids_and_returns_the_clients_own(gateway: Served, node: FakeNode) -> None:
    """The gateway assigns request ids; no client can take another request's id.

    A client's own id is returned beside it.
    """
    for name, given, echoed in (
        ("x-client-request-id", "mine-1", "mine-1"),
        ("x-request-id", "mine-1", "mine-1"),
        ("x-request-id", "a b", None),
    ):
        answer = await gateway.http.get("/health", headers={name: given})
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.headers.get("x-client-request-id") == echoed
    await node.engine("alpha")
    first = (await gateway.http.post(URL, json=chat())).headers["x-request-id"]
    second = await gateway.http.post(URL, json=chat(), headers={"x-request-id": first})
    assert second.headers["x-request-id"] != first
    assert second.headers["x-client-request-id"] == first


async def test_api_keys_grant_access_by_scope(node: FakeNode, serve: ServeFn, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# people\n{hash_key('sk-file')} alice\n")
    async with serve(api_keys=hash_key("sk-list"), api_keys_file=keys, admin_key="root") as gateway:

        async def status(path: str, key: str | None) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return (await gateway.http.get(path, headers=headers)).status_code

        assert [await status("/v1/models", k) for k in (None, "sk-no", "root")] == [401, 401, 401]
        assert [await status("/v1/models", k) for k in ("sk-list", "sk-file")] == [200, 200]
        assert [await status("/admin/v1/traces/x", k) for k in (None, "sk-list", "root")] == [401, 401, 404]
        assert await status("/health", None) == 200


async def test_log_probabilities_and_token_ids_have_the_openai_shape(gateway: Served, node: FakeNode) -> None:
    token = TokenLogprob(
        token_id=5, token="é", logprob=-0.5, bytes=(195, 169), top=(TopLogprob(token_id=5, token="é", logprob=-0.5),)
    )

    async def certain(run: Run) -> None:
        await run.start(prompt_token_ids=(1, 2))
        await run.say(
            InferChunk(seq=0, choices=(ChoiceDelta(text="é", token_ids=(5,), logprobs=(token,), finish_reason="length"),))
        )
        await run.end(1)

    await node.engine("alpha", certain)
    chosen = (await gateway.http.post(URL, json=chat(logprobs=True, return_token_ids=True))).json()
    content = chosen["choices"][0]["logprobs"]["content"]
    assert content == [
        {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": [{"token": "é", "logprob": -0.5, "bytes": None}]}
    ]
    assert (chosen["prompt_token_ids"], chosen["choices"][0]["token_ids"]) == ([1, 2], [5])
    assert chosen["choices"][0]["finish_reason"] == "length"
    text = (await gateway.http.post("/v1/completions", json={"model": "alpha", "prompt": "x", "logprobs": 1})).json()
    assert text["choices"][0]["logprobs"] == {
        "tokens": ["é"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"é": -0.5}],
        "text_offset": [0],
    }


@pytest.mark.own_nats_server
async def test_the_catalogue_follows_changes_and_a_restart_of_nats(gateway: Served, node: FakeNode, own_nats: NatsServer) -> None:
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    await bucket.delete(subjects.token("beta"))
    await until(lambda: _lists(gateway, "beta", False))
    own_nats.restart()
    await until(lambda: _registered(node, card_of("gamma")), within=60)
    await until(lambda: _lists(gateway, "gamma", True))
    await node.engine("gamma")
    answer = await gateway.http.post(URL, json=chat("gamma"))
    assert answer.json()["choices"][0]["message"]["content"] == "".join(WORDS)


async def _lists(gateway: Served, model: str, there: bool) -> bool:
    return (model in {m["id"] for m in (await gateway.http.get("/v1/models")).json()["data"]}) == there


async def _registered(node: FakeNode, card: ModelCard) -> bool:
    """True if JetStream, which restarts slowly, has stored the card."""
    try:
        bucket = await catalog_bucket(node.mesh.nc.jetstream(timeout=2))
        await bucket.put(subjects.token(card.name), card.model_dump_json().encode())
    except NatsError:
        return False
    return True


async def test_removed_model_fails_its_waiting_requests(gateway: Served, node: FakeNode) -> None:
    waiting = asyncio.create_task(gateway.http.post(URL, json=chat()))
    await node.until_demand(lambda: len(node.demand) > 0)
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    await bucket.delete(subjects.token("alpha"))
    assert (await waiting).status_code == 404


async def test_admin_requests_are_forwarded_to_the_scheduler(gateway: Served, node: FakeNode) -> None:
    asked: list[AdminRequest] = []

    async def answer(request: AdminRequest) -> Message:
        asked.append(request)
        if request.kind == "view":
            return ClusterView(scheduler="s", epoch=3)
        if request.kind == "wake":
            return ModelAwake(instance_id="i")
        if request.kind == "add_models" and not request.replace:
            raise Conflict("x is registered with another source", param="replace")
        if request.kind == "add_models":
            return ModelsAdded(changed=("x",))
        raise ModelNotFound("no such model", param="model")

    await node.mesh.respond(subjects.ADMIN, ADMIN_REQUEST, answer).start()
    await node.mesh.flush()
    viewed = await gateway.http.get("/admin/v1/cluster")
    assert viewed.status_code == 200, viewed.text
    assert viewed.json()["epoch"] == 3
    await gateway.http.get("/admin/v1/cluster?brief=true")
    assert [getattr(a, "brief", None) for a in asked] == [False, True]
    assert (await gateway.http.post("/admin/v1/models/org/x/wake?timeout=7")).json()["instance_id"] == "i"
    assert (asked[-1].deadline_ms, getattr(asked[-1], "name", "")) == (7000, "org/x")
    removed = await gateway.http.delete("/admin/v1/models/org/x")
    assert (removed.status_code, removed.json()["error"]["code"]) == (404, "model_not_found")
    body = {"specs": [{"name": "x", "source": "/m/x"}]}
    refused = await gateway.http.post("/admin/v1/models", json=body)
    assert (refused.status_code, refused.json()["error"]) == (
        409,
        {"message": "x is registered with another source", "type": "invalid_request_error", "param": "replace", "code": "conflict"},
    )
    assert (await gateway.http.post("/admin/v1/models", json={**body, "replace": True})).json()["changed"] == ["x"]
    faulty = await gateway.http.post("/admin/v1/models", json={"specs": [{"name": "x"}]})
    assert (faulty.status_code, faulty.json()["error"]["param"]) == (400, "specs[0].source")


async def test_metrics_and_openapi_description_are_served(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    await gateway.http.post(URL, json=chat())
    text = (await gateway.http.get("/metrics")).text
    assert 'le="120.0"' in text
    assert "gen_ai_server_time_to_first_token_seconds_bucket" in text
    assert "thaw_requests_total" in text
    described = (await gateway.http.get("/openapi.json")).json()
    assert set(described["paths"]) >= {URL, "/v1/completions", "/v1/embeddings", "/v1/models"}
    assert described["paths"]["/v1/responses/{id}"].keys() == {"get", "delete"}
    assert "ChatCompletionRequest" in described["components"]["schemas"]


async def test_stopping_lets_a_stream_finish(node: FakeNode, serve: ServeFn) -> None:
    go = asyncio.Event()

    async def paused(run: Run) -> None:
        await run.start()
        await run.text("one")
        await go.wait()
        await run.text("two")
        await run.finish(2)

    async with serve(drain_timeout=60.0) as gateway:
        await until_listed(gateway, CARDS)
        await node.engine("alpha", paused)
        async with gateway.http.stream("POST", URL, json=chat(stream=True)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            gateway.stop.set()
            await until(lambda: _refuses(gateway))
            go.set()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert await asyncio.wait_for(gateway.task, 60) == 0


async def _refuses(gateway: Served) -> bool:
    try:
        async with httpx.AsyncClient(timeout=60) as fresh:
            return (await fresh.get(f"{gateway.base}/ready")).status_code == 503
    except httpx.TransportError:
        return True


async def test_stop_ends_unfinished_streams_after_the_drain_timeout(node: FakeNode, serve: ServeFn) -> None:
    async with serve(drain_timeout=0.3) as gateway:
        await until_listed(gateway, CARDS)
        engine = await node.engine("alpha", hang)
        async with gateway.http.stream("POST", URL, json=chat(stream=True)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            gateway.stop.set()
            rest = [line async for line in lines if line]
        assert "shutting_down" in rest[-1]
        await engine.until(lambda: len(engine.cancelled) == 1)


async def test_slow_reader_is_cancelled_at_the_stream_buffer_limit(node: FakeNode, serve: ServeFn) -> None:
    async def torrent(run: Run) -> None:
        await run.start()
        while not run.cancelled.is_set():
            await run.text("x" * 50_000)
            await run.engine.mesh.flush()

    async with serve(stream_buffer_bytes=1024 * 1024) as gateway:
        await until_listed(gateway, CARDS)
        engine = await node.engine("alpha", torrent)
        async with gateway.http.stream("POST", URL, json=chat(stream=True)) as answer:
            await engine.until(lambda: len(engine.cancelled) == 1, within=60)
            lines = [line async for line in answer.aiter_lines() if line]
        assert "reads more slowly" in lines[-1]


async def test_prompt_over_the_context_is_refused_by_the_models_tokenizer(
    gateway: Served, node: FakeNode, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_length, "_LOAD_TIMEOUT_S", 60.0)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    card = card_of("small", context=10)
    card = card.model_copy(update={"info": card.info.model_copy(update={"source": str(tmp_path)})})
    await until(lambda: _registered(node, card))
    await until(lambda: _lists(gateway, "small", True))
    engine = await node.engine("small")
    for words, status in ((9, 200), (10, 400)):
        body = chat("small", messages=[{"role": "user", "content": "a " * words}])
        answer = await gateway.http.post(URL, json=body)
        assert answer.status_code == status
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(engine.requests) == 1


async def test_a_wake_is_interrupted_by_a_shutdown(node: FakeNode, serve: ServeFn) -> None:
    asked = asyncio.Event()

    async def never(request: AdminRequest) -> Message:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    await node.mesh.respond(subjects.ADMIN, ADMIN_REQUEST, never, concurrent=True).start()
    async with serve(drain_timeout=0.1) as served:
        waiting = asyncio.create_task(served.http.get("/admin/v1/migrations"))
        await asked.wait()
        served.stop.set()
        answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert answer.headers["x-should-retry"] == "true"


async def test_a_pull_is_repeated_until_the_scheduler_answers_it(gateway: Served, node: FakeNode) -> None:
    asked: list[PullModel] = []
    errors: list[ThawError] = [
        DeadlineExceeded("not done"),
        Unavailable("no longer the leader", retry_after_ms=1, should_retry=True),
        ReplyLost("lost"),
    ]

    async def answer(request: AdminRequest) -> Message:
        assert isinstance(request, PullModel)
        asked.append(request)
        if errors:
            raise errors.pop(0)
        if request.options.node == "n9":
            raise NotFound("No node 'n9'", param="node")
        return ModelPulled(name="org/x", node="n", tier="dram", tiers=("dram",), nbytes=7)

    await node.mesh.respond(subjects.ADMIN, ADMIN_REQUEST, answer).start()
    await node.mesh.flush()
    url = "/admin/v1/models/org/x/pull"
    pulled = await gateway.http.post(url, json={"node": "n", "tier": "dram"})
    assert (pulled.status_code, pulled.json()["node"], pulled.json()["nbytes"]) == (200, "n", 7), pulled.text
    request_id = asked[0].request_id
    assert request_id
    assert asked == [PullModel(name="org/x", options=PullOptions(node="n", tier="dram"), request_id=request_id)] * 4
    assert (await gateway.http.post(url)).status_code == 200, "the body may be left out"
    assert asked[-1].options == PullOptions()
    assert asked[-1].request_id != request_id, "another request"
    assert (await gateway.http.post(url, json={"node": "n9"})).status_code == 404
    for bad in ({"tier": "tape"}, {"node": ""}):
        assert (await gateway.http.post(url, json=bad)).status_code == 400
    assert (await gateway.http.post(f"{url}?timeout=x")).status_code == 400


async def test_pulls_are_cancelled_and_none_is_an_answer(gateway: Served, node: FakeNode) -> None:
    asked: list[CancelPulls] = []

    async def answer(request: AdminRequest) -> Message:
        if isinstance(request, PullModel):
            raise PullCancelled("The pull of org/x was cancelled")
        assert isinstance(request, CancelPulls)
        asked.append(request)
        if request.node == "n9":
            raise NotFound("No node 'n9'", param="node")
        return PullsCancelled(name=request.name, cancelled=(PullTarget(node="n", tier="ssd"),) if len(asked) == 1 else ())

    await node.mesh.respond(subjects.ADMIN, ADMIN_REQUEST, answer).start()
    await node.mesh.flush()
    url = "/admin/v1/models/org/x/pull"
    cancelled = await gateway.http.delete(url)
    assert (cancelled.status_code, cancelled.json()["cancelled"]) == (200, [{"node": "n", "tier": "ssd"}]), cancelled.text
    again = await gateway.http.delete(f"{url}?node=n&tier=ssd")
    assert (again.status_code, again.json()["name"], again.json()["cancelled"]) == (200, "org/x", [])
    assert asked == [CancelPulls(name="org/x"), CancelPulls(name="org/x", node="n", tier="ssd")]
    assert (await gateway.http.delete(f"{url}?node=n9")).status_code == 404
    for bad in ("tier=tape", "node=", "tier="):
        assert (await gateway.http.delete(f"{url}?{bad}")).status_code == 400, bad
    waited = await gateway.http.post(url)
    assert (waited.status_code, waited.json()["error"]["code"]) == (409, "pull_cancelled")
    assert waited.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", ["wake", "pull"])
async def test_pending_wake_or_pull_does_not_delay_the_shutdown(node: FakeNode, serve: ServeFn, path: str) -> None:
    asked = asyncio.Event()

    async def never(request: AdminRequest) -> Message:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    await node.mesh.respond(subjects.ADMIN, ADMIN_REQUEST, never, concurrent=True).start()
    async with serve(drain_timeout=600) as served:
        waiting = asyncio.create_task(served.http.post(f"/admin/v1/models/alpha/{path}"))
        await asked.wait()
        served.stop.set()
        answer = await waiting
        assert await asyncio.wait_for(served.task, 60) == 0
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert answer.headers["x-should-retry"] == "true"
