"""LoRA adapters of an engine like vLLM: loaded when first asked for, from copies of their files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.engine import DropAdapter, LoadAdapter
from shared.contracts.inference import InferData
from shared.contracts.loader import FetchModelFiles, ModelFilesFetched
from shared.contracts.migration import PrepareResume, ReadTokens, ResumePrepared, TokensRead
from shared.contracts.model_info import AdapterInfo, ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.errors import StoreFull
from tests.support.hosted import MIB, HostedAnswer, Hosts, fake_program, hosted_card, resumes_from_any_message


class Node:
    """The loader's side: the directories of adapters, and the card of each."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self.error: StoreFull | None = None
        self.fetched = 0

    async def start(self) -> None:
        async def fetch(request: FetchModelFiles) -> Message:
            self.fetched += 1
            if self.error is not None:
                raise self.error
            return ModelFilesFetched(directory=request.card.info.source)

        await self.hosts.mesh.respond(subjects.loader_command(self.hosts.node), TypeAdapter(FetchModelFiles), fetch).start()
        await self.hosts.mesh.flush()

    def adapter(self, name: str, revision: str = "r1", rank: int = 8) -> ModelCard:
        """Write an adapter's files, in one directory for all revisions, as a trainer does."""
        place = self.directory / name
        place.mkdir(exist_ok=True)
        (place / "adapter_config.json").write_text(json.dumps({"r": rank}))
        (place / "adapter_model.safetensors").write_bytes(f"{name} {revision}".encode())
        info = ModelInfo(
            source=str(place),
            revision=f"{name}-{revision}",
            architecture="LlamaForCausalLM",
            model_type="llama",
            task="generate",
            weights_bytes=MIB,
            parameters=1,
            dtype="float32",
            context_length=256,
            kv_bytes_per_token=1,
            adapter=AdapterInfo(rank=rank, alpha=8),
        )
        return ModelCard(spec=ModelSpec(name=name, source=str(place), base="demo"), info=info, created=0)


@pytest.fixture
async def node(hosts: Hosts, tmp_path: Path) -> Node:
    node = Node(hosts, tmp_path)
    await node.start()
    return node


def begin(node: Node, *options: str, **engine_args: Any) -> str:
    arguments = {"enable_lora": True, **engine_args}
    card = hosted_card("engine://demo", "vllm", memory=MIB, engine_args=arguments, keep_alive=-1)
    start = node.hosts.host(card, THAW_VLLM_PYTHON=fake_program(node.directory, "vllm", *options))
    return start.instance_id


async def ready(node: Node, **engine_args: Any) -> str:
    instance = begin(node, **engine_args)
    report = await node.hosts.settled(instance)
    assert report.state == "ready", report.error
    return instance


async def ask(node: Node, instance: str, adapter: ModelCard | None) -> HostedAnswer:
    return await node.hosts.request(instance, "completion", adapter=adapter, prompt="x", max_tokens=1, fake={"adapter": True})


async def weights_used(node: Node, instance: str, adapter: ModelCard | None) -> str:
    """Return the digest of the weights that a response was generated with; empty: the base."""
    answer = await ask(node, instance, adapter)
    assert answer.status == 200, answer.error
    assert answer.json["model"] == (adapter.name if adapter is not None else "demo")
    text: str = answer.json["choices"][0]["text"]
    return text.removesuffix("t0 ")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


async def engine_calls(node: Node, instance: str, path: str) -> list[Any]:
    stats = (await node.hosts.request_route(instance, "/stats", "GET")).json
    return [body for _, called, body in stats["calls"] if called == path]


async def test_adapter_is_loaded_at_its_first_request_and_serves_beside_the_base(node: Node) -> None:
    instance = await ready(node)
    sql = node.adapter("sql")
    assert await weights_used(node, instance, None) == ""
    assert await weights_used(node, instance, sql) == digest("sql r1")
    assert await weights_used(node, instance, sql) == digest("sql r1")
    assert await weights_used(node, instance, None) == ""
    assert node.fetched == 1
    report = await node.hosts.reported(instance, lambda r: bool(r.load.adapters))
    assert [(a.name, a.nbytes) for a in report.load.adapters] == [("sql", MIB)]


async def test_trained_again_in_place_it_serves_what_was_registered_until_the_new_revision_is(node: Node) -> None:
    instance = await ready(node, max_loras=2)
    old = node.adapter("sql")
    assert await weights_used(node, instance, old) == digest("sql r1")
    new = node.adapter("sql", "r2")
    assert await weights_used(node, instance, old) == digest("sql r1"), "the engine has a copy"
    assert await weights_used(node, instance, new) == digest("sql r2")
    loads = await engine_calls(node, instance, "/v1/load_lora_adapter")
    assert len({call["lora_path"] for call in loads}) == 2, "vLLM's prefix cache distinguishes adapters by name and path"


async def test_unregistered_adapter_is_unloaded_with_its_files(node: Node) -> None:
    instance = await ready(node)
    await weights_used(node, instance, node.adapter("sql"))
    (loaded,) = await engine_calls(node, instance, "/v1/load_lora_adapter")
    assert Path(loaded["lora_path"]).is_dir()
    await node.hosts.mesh.request(subjects.engine_control(instance), DropAdapter(name="sql"), Done)
    await node.hosts.eventually(lambda: engine_calls(node, instance, "/v1/unload_lora_adapter"), lambda calls: len(calls) == 1)

    async def is_there() -> bool:
        return Path(loaded["lora_path"]).exists()

    await node.hosts.eventually(is_there, lambda there: not there)


async def test_adapter_waits_for_a_slot_and_takes_that_of_an_idle_one(node: Node) -> None:
    instance = await ready(node)
    a, b = node.adapter("a"), node.adapter("b")
    body: dict[str, Any] = {"prompt": "x", "stream": True, "fake": {"tokens": 10_000, "pace": 0.01}}
    long = await node.hosts.ask(instance, "completion", adapter=a, **body)
    await long.until(lambda r: any(isinstance(x, InferData) for x in r))
    waiting = await node.hosts.ask(instance, "completion", adapter=b, prompt="x", max_tokens=1)
    assert await weights_used(node, instance, None) == "", "the base needs no slot"
    assert not waiting.replies
    await node.hosts.cancel(instance, long.request_id)
    await waiting.until(lambda r: any(isinstance(x, InferData) for x in r))
    assert [call["lora_name"] for call in await engine_calls(node, instance, "/v1/load_lora_adapter")] == ["a", "b"]
    assert [call["lora_name"] for call in await engine_calls(node, instance, "/v1/unload_lora_adapter")] == ["a"]


async def test_failed_load_is_the_error_of_its_request_alone(node: Node) -> None:
    instance = await ready(node)
    large = node.adapter("large", rank=32)
    refused = await ask(node, instance, large)
    assert refused.error is not None
    assert refused.error.code == "invalid_model"
    assert "LoRA rank 32 is greater than max_lora_rank 16" in refused.error.message
    node.error = StoreFull("the disk cache has no room")
    failed = await ask(node, instance, node.adapter("sql"))
    assert failed.error is not None
    assert failed.error.code == "store_full"
    node.error = None
    broken = node.adapter("sql")
    (Path(broken.info.source) / "adapter_model.safetensors").unlink()
    lost = await ask(node, instance, broken)
    assert lost.error is not None
    assert lost.error.code == "unavailable"
    assert "adapter_model.safetensors" in lost.error.message
    assert await weights_used(node, instance, node.adapter("sql")) == digest("sql r1"), "a failed load keeps no slot"


async def test_engine_without_lora_refuses_adapters(node: Node) -> None:
    instance = await ready(node, enable_lora=None)
    refused = await ask(node, instance, node.adapter("sql"))
    assert refused.error is not None
    assert refused.error.code == "unsupported_parameter"


async def test_adapter_that_requests_wait_for_is_loaded_as_soon_as_the_engine_is_ready(node: Node) -> None:
    instance = begin(node, "--ready-after", "2")
    await node.hosts.reported(instance, lambda r: r.progress > 0)
    await node.hosts.mesh.request(subjects.engine_control(instance), LoadAdapter(card=node.adapter("sql")), Done)
    await node.hosts.reported(instance, lambda r: [(a.name, a.active) for a in r.load.adapters] == [("sql", 0)])
    assert node.fetched == 1


async def test_response_of_an_adapter_is_resumed_with_it(node: Node) -> None:
    instance = await ready(node)
    sql = node.adapter("sql")
    body = {
        "prompt": "Hello",
        "stream": True,
        "temperature": 0,
        "max_tokens": 12,
        "fake": {"says": "one two three"},
        "adapter": sql,
    }
    undisturbed = await node.hosts.request(instance, "completion", **body)
    await resumes_from_any_message(node.hosts, instance, "completion", undisturbed, body)
    names = {call["model"] for call in await engine_calls(node, instance, "/v1/completions")}
    assert names == {"demo", "sql"}, "the base's requests are those of its start"


async def test_migrated_response_of_an_adapter_is_prepared_with_it(node: Node) -> None:
    source, destination = await ready(node), await ready(node)
    sql = node.adapter("sql")
    body: dict[str, Any] = {"prompt": "Hello", "stream": True, "fake": {"says": "word " * 2000, "pace": 0.01}}
    stream = await node.hosts.ask(source, "completion", adapter=sql, **body)
    await stream.until(lambda r: any(isinstance(x, InferData) and x.progress for x in r))
    control = subjects.engine_control
    read = await node.hosts.mesh.request(control(source), ReadTokens(request_id=stream.request_id), TokensRead)
    assert read.adapter == sql
    sequence = read.prompt_token_ids[0] + read.choices[0].token_ids
    order = PrepareResume(prepared="m", revision="r1", sequences=(sequence,), adapter=read.adapter)
    prepared = await node.hosts.mesh.request(control(destination), order, ResumePrepared)
    assert prepared.tokens == len(sequence)
    assert [call["model"] for call in await engine_calls(node, destination, "/v1/completions")][-1] == "sql"
    await node.hosts.cancel(source, stream.request_id)
