"""A mesh of several nodes with migrations, and streams that record the effect."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
import nats

from shared.contracts import subjects
from shared.contracts.migration import MigrationRecord
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import InstanceState
from shared.messaging.streams import migrations_bucket
from shared.sizing import MIB, need_of
from tests.support.launcher import Thaw, until
from tests.support.mesh import is_engine
from thaw.cli.demo import card_of
from thaw.demo.models import make_demo_model

STAGED_OPTIONS: dict[str, Any] = {"max_concurrency": 4}
"""Options of the models that `stage_budgets` is for."""


class Roomy(Thaw):
    """`nodes` nodes with room for `room` instances of a small model (`size`) each."""

    def begin(
        self,
        nodes: int,
        *,
        size: str = "test",
        names: tuple[str, ...] = ("one",),
        room: float = 2.5,
        positions: int | None = None,
        **options: Any,
    ) -> None:
        """Start the mesh.

        Args:
            positions: Tokens that the models accept, whatever their size (their weights are
                random).
        """
        self.environment.setdefault("THAW_DRAM_BYTES", "0")
        sources = {n: make_demo_model(self.home / "models" / n, size, seed=i) for i, n in enumerate(names)}
        for source in sources.values() if positions else ():
            config = json.loads((source / "config.json").read_text())
            (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
        card: ModelCard = card_of(ModelSpec(name=names[0], source=str(sources[names[0]]), **options))
        budget = int(need_of(card).total * room)
        document = {
            "mesh": {"port": self.port, "nodes": {f"node-{i}": {"cpu:0": budget} for i in range(nodes)}},
            "defaults": {"keep_alive": -1, **options},
            "models": [{"name": n, "source": str(s)} for n, s in sources.items()],
        }
        path = self.home / "thaw.yaml"
        path.write_text(json.dumps(document))
        self.json("up", "--detach", "--config", str(path))

    def place(self, model: str, *, serving: bool = False) -> tuple[str, str]:
        """Return the model's ready instance with the most requests, and its node.

        A group is on the node of its first stage.

        Args:
            serving: Wait until an instance reports a request.
        """
        found: list[tuple[dict[str, Any], dict[str, Any]]] = []

        def is_reported() -> bool:
            nodes = self.cluster()["nodes"]
            found[:] = [
                (i, n)
                for n in nodes
                for i in n["instances"]
                if i["model"] == model and i["state"] == "ready" and not is_later_stage(i)
            ]
            return not serving or any(i["load"]["active"] for i, _ in found)

        until(is_reported, what=f"an instance of {model} serves")
        instance, node = max(found, key=lambda x: x[0]["load"]["active"])
        return str(instance["instance_id"]), str(node["node"])

    def order(self, **fields: Any) -> dict[str, Any]:
        """Request what `thaw migrate` does, without a process for each order.

        Raises:
            httpx.HTTPStatusError: The gateway refuses the order.
        """
        return self._admin("migrations", fields)

    def move_away(self, request_id: str) -> dict[str, Any]:
        """Migrate a request to another node.

        Statuses may lag behind a stream that has just started, so each node is tried in turn.
        """
        for node in [n["node"] for n in self.cluster()["nodes"]]:
            try:
                return self.order(request_id=request_id, node=node)
            except httpx.HTTPStatusError as e:
                if e.response.status_code != 400:  # the request is on this node already
                    raise
        raise AssertionError(f"{request_id} is on every node")

    def _admin(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        key = json.loads((self.home / "run" / "endpoints.json").read_text())["admin_key"]
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{self.url}/admin/v1/{path}", json=fields, headers=headers, timeout=300, trust_env=False)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def everywhere(self, model: str) -> None:
        """Start an instance of the model on each node."""
        nodes = [n["node"] for n in self.cluster()["nodes"]]
        self.change(model, replicas={"min": len(nodes), "max": len(nodes)})
        until(lambda: all(self.on(model, n) for n in nodes), what=f"{model} on every node")

    def change(self, model: str, **fields: Any) -> None:
        """Register a model again, with some changed fields."""
        (spec,) = [m["card"]["spec"] for m in self.cluster()["models"] if m["card"]["spec"]["name"] == model]
        self._admin("models", {"specs": [{**spec, **fields}]})

    def serving(self, model: str) -> tuple[str, str, int]:
        """Wait until the model's one instance serves; return it, its node, its process."""
        found: list[tuple[str, str, int]] = []

        def is_reported() -> bool:
            found[:] = [
                (str(i["instance_id"]), str(n["node"]), int(i["pids"][0]))
                for n in self.cluster()["nodes"]
                for i in n["instances"]
                if i["model"] == model and i["state"] == "ready" and i["load"]["active"]
            ]
            return len(found) == 1

        until(is_reported, what=f"one instance of {model} serves")
        return found[0]

    def pid_of(self, instance_id: str) -> int:
        """Return the pid of its engine's process."""
        found = [i for n in self.cluster()["nodes"] for i in n["instances"] if i["instance_id"] == instance_id]
        return int(found[0]["pids"][0])

    def records(self) -> dict[str, MigrationRecord]:
        """Return the bucket of migrations, read directly: the gateway may be stopped."""
        return asyncio.run(_records(self.endpoints["nats_url"]))

    def write(self, record: MigrationRecord) -> None:
        """Write an order that no scheduler has checked."""
        asyncio.run(_write(self.endpoints["nats_url"], record))

    def gather(self, request_id: str, node: str) -> None:
        """Place a request on that node, wherever it runs now."""
        try:
            self.order(request_id=request_id, node=node)
        except httpx.HTTPStatusError as e:
            if e.response.status_code != 400:  # it is there already
                raise

    def on(self, model: str, node: str) -> list[str]:
        cluster = self.cluster()
        return [
            str(i["instance_id"])
            for n in cluster["nodes"]
            if n["node"] == node
            for i in n["instances"]
            if i["model"] == model and i["state"] == "ready"
        ]

    def faults_in_the_books(self) -> list[str]:
        """Return bookings, processes and leases without an owner; empty if there are none."""
        try:
            cluster = self.cluster()
        except AssertionError as e:
            return [f"no view of the cluster: {e}"[:300]]
        faults = [f"migration {m['migration_id']} is {m['state']}" for m in cluster["migrations"]]
        pids: set[int] = set()
        for node in cluster["nodes"]:
            live = [i for i in node["instances"] if InstanceState(i["state"]).holds_memory]
            pids |= {int(pid) for i in live for pid in i["pids"]}
            faults += [f"{i['instance_id']} is {i['state']}" for i in live if i["state"] != "ready"]
            faults += [
                f"{i['instance_id']} serves or keeps {i['load']}" for i in live if i["load"]["active"] or i["load"]["kv_bytes_used"]
            ]
            reserved = sum(d["reserved_bytes"] for d in node["devices"])
            booked = sum(i["memory"]["reserved"] for i in live)
            if reserved != booked:
                faults.append(f"{node['node']}: {reserved} bytes reserved, and {booked} by live instances")
        engines = {p.pid for p in self.processes() if is_engine(p)}
        if engines != pids:
            faults.append(f"engine processes {engines}, and {pids} of live instances")
        return faults

    def assert_settled(self, within: float = 120.0) -> None:
        """Check that nothing is left over.

        Prepared state that no resume used is kept for at most 30 s.
        """
        deadline = time.monotonic() + within
        while faults := self.faults_in_the_books():
            assert time.monotonic() < deadline, f"{faults}{self.last_words()}"
            time.sleep(0.2)

    def settled(self) -> bool:
        """True if no engine serves or keeps state, and no migration is in progress.

        The status of a failed instance has the load from before its failure.
        """
        cluster = self.cluster()
        live = [i for n in cluster["nodes"] for i in n["instances"] if i["state"] != "failed"]
        busy = any(i["load"]["active"] or i["load"]["waiting"] or i["load"]["kv_bytes_used"] for i in live)
        return not busy and not cluster["migrations"]

    def await_settled(self, within: float = 120.0) -> None:
        """Wait until nothing is left over.

        Prepared state that no resume used is kept for at most 30 s.
        """
        until(self.settled, within, "no request, no keys and values, no migration is left")


def is_later_stage(instance: dict[str, Any]) -> bool:
    return instance["group"] is not None and instance["group"]["index"] > 0


def stage_budgets(source: Path) -> tuple[int, int]:
    """Return the bytes of a device for one of two stages of a model, and for the whole model.

    The first is too small for the whole model: of its KV cache a stage needs half.
    """
    whole = need_of(card_of(ModelSpec(name="whole", source=str(source), **STAGED_OPTIONS))).total
    return whole - 4 * MIB, whole + 2 * MIB


async def _records(url: str) -> dict[str, MigrationRecord]:
    nc = await nats.connect(url)
    try:
        js = nc.jetstream(timeout=60)
        bucket = await migrations_bucket(js)
        # Not `bucket.keys()`: that misses an entry that is written at that moment.
        prefix = f"$KV.{subjects.MIGRATIONS_BUCKET}."
        info = await js.stream_info(f"KV_{subjects.MIGRATIONS_BUCKET}", subjects_filter=f"{prefix}>")
        found = [await bucket.get(subject.removeprefix(prefix)) for subject in info.state.subjects or {}]
        return {e.key: MigrationRecord.model_validate_json(e.value or b"") for e in found}
    finally:
        await nc.close()


async def _write(url: str, record: MigrationRecord) -> None:
    nc = await nats.connect(url)
    try:
        bucket = await migrations_bucket(nc.jetstream(timeout=60))
        await bucket.create(record.migration_id, record.model_dump_json().encode())
    finally:
        await nc.close()


def body(model: str, seed: int | None = None, **more: Any) -> dict[str, Any]:
    sampled = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
    return {"model": model, "prompt": "Once upon a time", "max_tokens": 200, "logprobs": 1, **sampled, **more}


@dataclass
class Stream:
    """One streamed completion, read in a thread of its own.

    Attributes:
        gaps: Seconds between tokens.
        began: The time of the request.
        first: The time of the first token.
    """

    url: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    request_id: str = ""
    text: str = ""
    tokens: list[str | int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: str = ""
    done: bool = False
    gaps: list[float] = field(default_factory=list)
    began: float = 0.0
    first: float = 0.0
    ids: set[str] = field(default_factory=set)
    path: ClassVar[str] = "/v1/completions"

    def __post_init__(self) -> None:
        self.opened = threading.Event()
        self._left = threading.Event()
        self.thread = threading.Thread(target=self._read, name="stream", daemon=True)

    def start(self) -> Stream:
        self.thread.start()
        return self

    def leave(self) -> None:
        """Disconnect the client."""
        self._left.set()

    def _read(self) -> None:
        self.began = time.monotonic()
        try:
            wanted = {**self.body, "stream": True, "stream_options": {"include_usage": True}}
            with (
                httpx.Client(timeout=240, trust_env=False, verify=False) as client,
                client.stream("POST", f"{self.url}{self.path}", json=wanted, headers=self.headers) as response,
            ):
                self.request_id = response.headers.get("x-request-id", "")
                last = time.monotonic()
                for line in response.iter_lines():
                    if self._left.is_set():
                        return
                    if line.startswith("data: "):
                        now = time.monotonic()
                        self.gaps.append(now - last)
                        last = now
                        self._take(line[6:])
        except httpx.HTTPError as e:
            self.error = repr(e)
        finally:
            self.opened.set()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
            return
        self.ids.add(chunk["id"])
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.text += self._text_of(choice)
            if choice.get("logprobs"):
                self.tokens += choice["logprobs"]["tokens"]
                self.logprobs += choice["logprobs"]["token_logprobs"]
            self.tokens += choice.get("token_ids") or ()
            self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids
            self.finish = choice["finish_reason"] or self.finish
            self.first = self.first or time.monotonic()
        self.opened.set()

    def _text_of(self, choice: dict[str, Any]) -> str:
        return str(choice["text"])

    def result(self, within: float = 300.0) -> Stream:
        self.thread.join(within)
        assert not self.thread.is_alive(), f"a stream has not ended: {len(self.tokens)} tokens"
        return self

    def differs(self, undisturbed: Stream) -> int | None:
        """Return the first token that differs; None if there is none."""
        pairs = enumerate(zip(self.tokens, undisturbed.tokens, strict=False))
        return next((n for n, (a, b) in pairs if a != b), None if len(self.tokens) == len(undisturbed.tokens) else len(self.tokens))

    def _parted(self, undisturbed: Stream) -> str:
        """Describe where two responses part, and the gap of log-probabilities before.

        A small gap suggests rounding, a large one another KV cache.
        """
        at = self.differs(undisturbed)
        before = max((abs(a - b) for a, b in zip(self.logprobs[:at], undisturbed.logprobs[:at], strict=False)), default=0.0)
        return f"token {at} of {len(self.tokens)}; log-probabilities before it differ by at most {before:.1e}"

    def assert_same(self, undisturbed: Stream) -> None:
        """Check that all tokens are the same, with none repeated or lost."""
        assert not self.error, self.error
        assert self.done
        assert self.tokens == undisturbed.tokens, self._parted(undisturbed)
        assert self.text == undisturbed.text
        assert self.finish == undisturbed.finish
        assert self.usage == undisturbed.usage
        assert len(self.ids) == 1
        assert all(abs(a - b) < 1e-2 for a, b in zip(self.logprobs, undisturbed.logprobs, strict=True))


class ChatStream(Stream):
    """One streamed chat completion; its text is the content, or the arguments of tool calls."""

    path = "/v1/chat/completions"

    def _text_of(self, choice: dict[str, Any]) -> str:
        delta = choice["delta"]
        calls = (call["function"].get("arguments") for call in delta.get("tool_calls") or ())
        return "".join(text for text in (delta.get("content"), *calls) if text)
