"""Foreign engines in a whole mesh with the real openai client.

The engines take turns on a device that has room for one.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import nats
import openai
import pytest
import yaml
from nats.aio.msg import Msg

from shared.contracts import subjects
from shared.contracts.node import InstanceState, InstanceStatus, NodeChanges, NodeStatus
from shared.contracts.phases import Phase
from shared.node_statuses import NodeStatuses
from tests.support.adapters import write_adapter
from tests.support.launcher import ROOT, Thaw, until

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
COMMAND = [sys.executable, "-m", "tests.support.fake_openai", "--port", "{port}"]
VLLM = {
    "engine": "vllm",
    "command": [*COMMAND, "--like", "vllm", "--enable-lora", "--served-model-name", "{name}"],
    "engine_args": {"enable_lora": True},
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Thaw]:
    # A victim that ignores SIGTERM lives until a busy node has begun the next start, which waits.
    thaw = Thaw(THAW_KILL_GRACE="12", THAW_GRANT_WAIT="60")
    one = {
        "source": "engine://m",
        "engine": "openai",
        "memory": "600MiB",
        "max_model_len": 4096,
        "command": COMMAND,
        "env": {"PYTHONPATH": str(ROOT)},
    }
    config = thaw.home / "thaw.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "mesh": {"port": thaw.port, "nodes": {"node-0": {"cpu:0": "1GiB"}}},
                "models": [
                    {"name": "one", "aliases": ["gpt-one"], "routes": ["/v1/rerank"], **one},
                    {"name": "two", **one},
                    {"name": "mute", **one, "command": [*COMMAND, "--mute"]},
                    {"name": "stubborn", **one, "command": [*COMMAND, "--ignore-term"]},
                    {"name": "patient", **one},
                    {"name": "tuned", **one, **VLLM},
                ],
            }
        )
    )
    try:
        thaw.json("up", "--detach", "--config", str(config))
        yield thaw
    finally:
        thaw.close()


@pytest.fixture
def client(mesh: Thaw) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def fake(**orders: Any) -> dict[str, Any]:
    return {"fake": orders}


def test_complete_and_streamed_responses_are_equal(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "gpt-one", "messages": HELLO, "max_tokens": 3}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == "t0 t1 t2 "
    with client.chat.completions.create(**asked, stream=True) as stream:
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == "t0 t1 t2 "


def test_tools_and_json_mode_are_the_engines(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="one", messages=HELLO, tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert calls[0].function.name == "look"


def test_errors_are_the_engines(client: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.chat.completions.create(model="one", messages=HELLO, extra_body=fake(status=422))
    body: Any = refused.value.body
    assert body["code"] == "own_code"


def test_client_disconnect_stops_the_engine(mesh: Thaw, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="one", messages=HELLO, stream=True, extra_body=fake(tokens=10_000, pace=0.01))
    next(iter(stream))
    assert mesh.instance("one")["load"]["active"] in (0, 1)
    stream.close()
    until(lambda: mesh.instance("one")["load"]["active"] == 0, what="the engine is idle")


def test_declared_routes_are_forwarded_to_the_engine(mesh: Thaw) -> None:
    answer = httpx.post(f"{mesh.url}/v1/rerank", json={"model": "one", "documents": ["x"]}, timeout=120)
    assert answer.json() == {"echo": {"model": "one", "documents": ["x"]}}
    assert httpx.post(f"{mesh.url}/v1/rerank", json={"model": "two"}, timeout=120).status_code == 404


def test_ledger_has_the_time_of_the_engine(mesh: Thaw, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="one", messages=HELLO, stream=True, max_tokens=5, extra_body=fake(tokens=5, pace=0.01)
    ).close()

    def computed() -> int:
        rows = mesh.json("usage", "--by", "model")["rows"]
        return sum(r["counts"]["compute_cpu_us"] for r in rows if r["model"] == "one")

    until(lambda: computed() > 0, what="the ledger has it")


def test_two_models_alternate_on_a_device_with_room_for_one(mesh: Thaw, client: openai.OpenAI) -> None:
    for name in ("two", "one", "two"):
        assert client.chat.completions.create(model=name, messages=HELLO, max_tokens=1).choices[0].message.content == "t0 "
        mesh.instance(name)


def test_adapter_is_registered_and_served_by_its_bases_vllm(mesh: Thaw, client: openai.OpenAI) -> None:
    directory = write_adapter(mesh.home / "sql", mesh.home, modules={"model.layers.0.self_attn.q_proj": (64, 64)})
    mesh.json("models", "add", "sql", str(directory), "--base", "tuned")
    digest = hashlib.sha256((directory / "adapter_model.safetensors").read_bytes()).hexdigest()[:16]
    for name, text in (("tuned", "t0 "), ("sql", f"{digest}t0 "), ("tuned:sql", f"{digest}t0 ")):
        answer = client.chat.completions.create(model=name, messages=HELLO, max_tokens=1, extra_body=fake(adapter=True))
        assert (answer.choices[0].message.content, answer.model) == (text, name.removeprefix("tuned:"))
    until(lambda: [a["name"] for a in mesh.instance("tuned")["load"]["adapters"]] == ["sql"], what="the status has the adapter")
    mesh.json("models", "rm", "sql")
    until(lambda: not mesh.instance("tuned")["load"]["adapters"], what="the adapter is unloaded")
    refused = mesh.error("models", "add", "poems", str(directory), "--base", "one")
    assert "engines that serve adapters: builtin, vllm" in refused["message"]


async def test_start_waits_on_its_node_while_its_victim_stops(mesh: Thaw) -> None:
    """A start waits on its node while its victim stops.

    Its process exists, without memory, before the victim has ended; the node then grants the bytes
    instead of refusing. Both models are new: measured models need less, so two would fit.
    """
    received: asyncio.Queue[dict[str, InstanceStatus]] = asyncio.Queue()
    statuses = NodeStatuses()

    async def hear_changes(message: Msg) -> None:
        if (status := statuses.on_changes(NodeChanges.model_validate_json(message.data))) is not None:
            put(status.instances)

    async def hear(message: Msg) -> None:
        status = NodeStatus.model_validate_json(message.data)
        statuses.on_status(status, time.monotonic())
        put(status.instances)

    def put(instances: tuple[InstanceStatus, ...]) -> None:
        received.put_nowait({i.model: i for i in instances if i.state not in (InstanceState.STOPPED, InstanceState.FAILED)})

    nc = await nats.connect(mesh.endpoints["nats_url"])
    try:
        async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=120, max_retries=0) as client:

            async def text(model: str) -> str | None:
                answer = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=1)
                return answer.choices[0].message.content

            await text("stubborn")
            await nc.subscribe(subjects.ALL_NODE_STATUS, cb=hear)
            await nc.subscribe(subjects.ALL_NODE_CHANGES, cb=hear_changes)
            asked = asyncio.create_task(text("patient"))
            async with asyncio.timeout(120):
                while not ("patient" in (seen := await received.get()) and "stubborn" in seen):
                    assert not asked.done()
                assert seen["stubborn"].state is InstanceState.DRAINING
                waits = seen["patient"]
                assert (waits.state, waits.phase) == (InstanceState.PREPARING, Phase.RESERVE)
                assert waits.memory.reserved == 0
                assert await asked == "t0 "
                assert mesh.instance("patient")["instance_id"] == waits.instance_id
        assert "start command refused" not in "".join(p.read_text() for p in (mesh.home / "logs").glob("scheduler*.log"))
    finally:
        await nc.close()


def test_engine_that_generates_no_token_fails_the_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="generated no token"):
        client.chat.completions.create(model="mute", messages=HELLO)


def test_engine_exit_during_a_response_is_an_error_and_the_next_is_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError):
        client.chat.completions.create(model="one", messages=HELLO, extra_body=fake(exit=3))
    patient = client.with_options(max_retries=5)
    assert patient.chat.completions.create(model="one", messages=HELLO, max_tokens=1).choices[0].message.content == "t0 "
