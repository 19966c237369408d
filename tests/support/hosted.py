"""Real hosts of engines under test, and the messages they send back."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from services.enginehost.runtimes import reaper
from shared.contracts import subjects
from shared.contracts.engine import EngineStart
from shared.contracts.inference import (
    CancelInfer,
    InferData,
    InferEnd,
    InferFailed,
    InferReply,
    InferResponse,
    Resume,
    ResumedChoice,
)
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.processes import find_marked, mark_of
from shared.settings import NodeSettings
from tests.support.engines import Engines, Stream
from weights.formats.tokenizer import special_token_ids

T = TypeVar("T")
MIB = 1 << 20


def token_of(pid: int) -> str:
    """Return the token by which a hosted engine's reaper recognizes its processes."""
    return psutil.Process(pid).environ()[reaper.VARIABLE]


def reapers(token: str) -> set[int]:
    return {p.pid for p in psutil.process_iter(["cmdline"]) if f"{reaper.VARIABLE}={token}" in (p.info["cmdline"] or ())}


class HostedAnswer:
    """A whole HTTP response."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        heads = [r for r in stream.replies if isinstance(r, InferResponse)]
        self.status = heads[0].status if heads else 0
        self.body = b"".join(base64.b64decode(r.data) for r in stream.replies if isinstance(r, InferData))
        last = stream.replies[-1]
        self.usage = last.usage.model_copy(update={"device_s": 0.0}) if isinstance(last, InferEnd) else None
        self.device_s = last.usage.device_s if isinstance(last, InferEnd) else 0.0
        self.error = last.error if isinstance(last, InferFailed) else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Return the data of a stream's events, without the final `[DONE]`."""
        found = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        assert found[-1] == "[DONE]"
        return [json.loads(e) for e in found[:-1]]

    def text(self) -> str:
        """Return the text of a stream of text or chat completions."""
        choices = [e["choices"][0] for e in self.events() if e["choices"]]
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


def resume_of(replies: Sequence[InferReply], revision: str = "r1") -> Resume:
    """Return a gateway's resume state after these messages."""
    head = next(r for r in replies if isinstance(r, InferResponse))
    deltas = [d for r in replies if isinstance(r, InferData) for d in r.progress]
    tokens = tuple(t for d in deltas for t in d.token_ids)
    reason = next((d.finish_reason for d in deltas if d.finish_reason), None)
    choice = ResumedChoice(token_ids=tokens, text_chars=sum(len(d.text) for d in deltas), finish_reason=reason)
    return Resume(revision=revision, choices=(choice,), prompt_tokens=head.prompt_tokens, head=head.resume_head)


def bytes_of(replies: Sequence[InferReply]) -> bytes:
    return b"".join(base64.b64decode(r.data) for r in replies if isinstance(r, InferData))


def text_and_events(body: bytes) -> tuple[str, list[Any]]:
    """Return text and events of a stream, or of a part of one."""
    events = [json.loads(e[6:]) for e in body.decode().split("\n\n") if e.startswith("data: {")]
    choices = [c for e in events for c in e["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices), events


class Hosts(Engines):
    """The nodeagent's and the gateway's side of one node's hosted engines."""

    def host(self, card: ModelCard, *, device: str = "cpu:0", cgroup_procs: str | None = None, **environment: Any) -> EngineStart:
        """Start a host as the nodeagent does."""
        start = self.spec(card, kv_bytes=64 * MIB, **environment).model_copy(
            update={"cgroup_procs": cgroup_procs, "device": device}
        )
        self.spawn(start, "services.enginehost")
        return start

    async def request(self, instance_id: str, endpoint: Any, **body: Any) -> HostedAnswer:
        """Send a request and return its complete response."""
        stream = await self.ask(instance_id, endpoint, **body)
        await stream.until(lambda r: bool(r) and isinstance(r[-1], InferEnd | InferFailed))
        return HostedAnswer(stream)

    async def cancel(self, instance_id: str, request_id: str) -> None:
        await self.mesh.nc.publish(
            subjects.engine_control(instance_id), CancelInfer(request_id=request_id).model_dump_json().encode()
        )

    async def request_route(self, instance_id: str, route: str, method: str, query: str = "", **body: Any) -> HostedAnswer:
        """Send a request to a route that only the engine serves; return the complete response."""
        stream = await self.ask(instance_id, "other", route=route, method=method, query=query, **body)
        await stream.until(lambda r: bool(r) and isinstance(r[-1], InferEnd | InferFailed))
        return HostedAnswer(stream)

    async def eventually(self, ask: Callable[[], Awaitable[T]], wanted: Callable[[T], bool], within: float = 60.0) -> T:
        """Repeat a request until the response is as wanted."""
        deadline = time.monotonic() + within
        while not wanted(found := await ask()):
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.02)
        return found

    def marked(self, instance_id: str) -> set[int]:
        """Return the processes of the instance's engine."""
        return find_marked(mark_of(NodeSettings(node=self.node).scope, instance_id))

    async def left_nothing(self, instance_id: str) -> None:
        """Wait until no process of the engine is left."""

        async def left() -> set[int]:
            return await asyncio.to_thread(self.marked, instance_id)

        await self.eventually(left, lambda pids: not pids)


async def resumes_from_any_message(
    hosts: Hosts, instance: str, endpoint: Any, undisturbed: HostedAnswer, body: dict[str, Any]
) -> None:
    """Check the response to `body`, cut after each message and resumed."""
    replies = undisturbed.stream.replies
    text, events = text_and_events(undisturbed.body)
    whole = resume_of(replies)
    for cut in range(2, len(replies) - 1):
        resume = resume_of(replies[:cut])
        if resume.choices[0].finish_reason is not None:
            break
        rest = await hosts.ask(instance, endpoint, resume=resume, **body)
        await rest.until(lambda r: bool(r) and isinstance(r[-1], InferEnd | InferFailed))
        again = HostedAnswer(rest)
        joined, joined_events = text_and_events(bytes_of(replies[:cut]) + again.body)
        assert joined == text, cut
        assert again.usage == undisturbed.usage, cut
        assert {(e["id"], e["created"], e["object"]) for e in joined_events} == {
            (e["id"], e["created"], e["object"]) for e in events
        }
        both = resume_of(rest.replies).choices[0]
        assert resume.choices[0].token_ids + both.token_ids == whole.choices[0].token_ids, cut
        assert both.finish_reason == whole.choices[0].finish_reason
        assert [e.get("usage") for e in joined_events if e.get("usage")] == [e["usage"] for e in events if e.get("usage")]


def hosted_card(source: Path | str, engine: str = "openai", *, context: int = 256, **options: Any) -> ModelCard:
    """Build a card as the scheduler does, without a loader."""
    spec = ModelSpec.model_validate(
        {"name": "demo", "source": str(source), "engine": engine, "max_model_len": context, "max_concurrency": 4, **options}
    )
    info = ModelInfo(
        source=str(source),
        revision="r1",
        architecture="LlamaForCausalLM",
        model_type="llama",
        task="generate",
        weights_bytes=10 * MIB,
        parameters=1000,
        dtype="bfloat16",
        context_length=max(context, 1024),
        kv_bytes_per_token=64,
        has_chat_template=True,
        shape="s1",
        special_token_ids=special_token_ids(Path(source), [f.name for f in Path(source).glob("tokenizer*.json")]),
    )
    return ModelCard(spec=spec, info=info, created=0)


FAKE = [sys.executable, "-m", "tests.support.fake_openai", "--port", "{port}"]


def fake_program(directory: Path, like: str, *options: str) -> str:
    """Write an executable that stands in for the engine's program."""
    found = directory / "engine"
    options_text = " ".join(("--like", like, *options))
    found.write_text(f'#!/bin/sh\ncd {Path.cwd()}\nexec {sys.executable} -m tests.support.fake_openai {options_text} "$@"\n')
    found.chmod(0o755)
    return str(found)


def fake_card(*options: str, **more: Any) -> ModelCard:
    """Build a card of an engine that runs tests/support/fake_openai.py."""
    return hosted_card("engine://m", command=[*FAKE, *options], memory=MIB, **more)
