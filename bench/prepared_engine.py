"""An engine that streams prepared tokens, so that what is in front of it is what is measured.

    python -m bench.prepared_engine --nats URL --port PORT [--pace MS] [--slots N]

One process, one loop and one source of tokens behind two doors: the mesh's inference contract over
NATS (with the catalogue entries and the status that a gateway routes by) and OpenAI's chat
completions as server-sent events over HTTP. Both send one token per message. It serves two models:
`free` writes as fast as it can, each stream one token in turn; `paced` one token every MS
milliseconds. With `--slots` an instance runs so many streams at once, in order of arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import uvicorn
import uvloop
from nats.aio.msg import Msg
from pydantic import SecretStr
from starlette.types import Receive, Scope, Send

from shared.contracts import subjects
from shared.contracts.engine import EngineLoad
from shared.contracts.inference import ChoiceDelta, InferChunk, InferFinished, InferStarted, Usage
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import STATUS_INTERVAL_S, DeviceStatus, InstanceState, InstanceStatus, NodeStatus, StatusWanted
from shared.messaging import Mesh
from shared.messaging.streams import catalog_bucket
from shared.settings import CommonSettings

FREE, PACED = "free", "paced"
WORDS = (" the", " winter", " is", " long", " and", " white", ",", " they", " say", ".")
PROMPT_TOKENS = 8
TOKEN_S = 1e-3
"""Device-seconds of a token, as it reports them."""
_NODE = "prepared"
_CAPACITY = 4096


async def schedule(count: int, interval_s: float) -> AsyncIterator[int]:
    """Yield the numbers from 0 to `count`, each at its time.

    Without an interval, other streams have their turn between two numbers.
    """
    clock = asyncio.get_running_loop().time
    started = clock()
    for i in range(count):
        if i:
            await asyncio.sleep(max(0.0, started + i * interval_s - clock()) if interval_s else 0)
        yield i


def _chunk_tails() -> tuple[bytes, ...]:
    """Return the bytes after the number in an `InferChunk`, for each word."""
    whole = [InferChunk(seq=0, choices=(ChoiceDelta(text=w, token_ids=(i,)),)).model_dump_json() for i, w in enumerate(WORDS)]
    return tuple(text.split('"seq":0', 1)[1].encode() for text in whole)


_CHUNK_HEAD = InferChunk(seq=0, choices=()).model_dump_json().split('"seq":0', 1)[0].encode() + b'"seq":%d'
_CHUNK_TAILS = _chunk_tails()


def card_of(name: str) -> ModelCard:
    info = ModelInfo(
        source="/prepared",
        revision="0",
        architecture="Prepared",
        model_type="prepared",
        task="generate",
        weights_bytes=1,
        parameters=1,
        dtype="float32",
        context_length=1 << 20,
        kv_bytes_per_token=1,
        has_chat_template=True,
    )
    return ModelCard(spec=ModelSpec(name=name, source="/prepared"), info=info, created=1_700_000_000)


@dataclass
class Instance:
    """One model on the mesh."""

    model: str
    interval_s: float
    slots: int = _CAPACITY
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.free = asyncio.Semaphore(self.slots)

    def status(self) -> InstanceStatus:
        return InstanceStatus(
            instance_id=self.model,
            plan_id=self.model,
            token=1,
            model=self.model,
            generation=1,
            revision="0",
            device_ids=("cpu:0",),
            state=InstanceState.READY,
            capacity=self.slots,
            load=EngineLoad(active=len(self.running)),
        )


class MeshDoor:
    """Plays the engines and their nodeagent.

    There is no scheduler: both models are ready all the time.
    """

    def __init__(self, nats_url: str, intervals: dict[str, float], slots: int = _CAPACITY) -> None:
        self._mesh = Mesh(CommonSettings(nats_url=SecretStr(nats_url)), "prepared-engine")
        self._mesh.listen(subjects.STATUS_WANTED, StatusWanted, self._on_wanted)
        self._instances = {model: Instance(model, interval, slots) for model, interval in intervals.items()}
        self._seq = 0

    async def start(self) -> None:
        await self._mesh.start()
        bucket = await catalog_bucket(self._mesh.nc.jetstream())
        for model in self._instances:
            await bucket.put(subjects.token(model), card_of(model).model_dump_json().encode())
            await self._mesh.nc.subscribe(subjects.infer(model), cb=self._on_request)
            await self._mesh.nc.subscribe(subjects.engine_control(model), cb=self._on_cancel)

    async def broadcast(self) -> None:
        """Send a status every second until cancelled."""
        while True:
            await self._announce()
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def _on_wanted(self, _: StatusWanted) -> None:
        await self._announce()

    async def _announce(self) -> None:
        self._seq += 1
        device = DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=2, reserved_bytes=2)
        instances = tuple(i.status() for i in self._instances.values())
        status = NodeStatus(node=_NODE, boot_id=_NODE, seq=self._seq, devices=(device,), instances=instances)
        await self._mesh.publish(subjects.node_status(_NODE), status)

    async def _on_request(self, message: Msg) -> None:
        request = json.loads(message.data)
        instance, name = self._instances[request["instance_id"]], request["request_id"]
        task = asyncio.create_task(self._answer(instance, message.reply, request["body"]["max_tokens"]))
        instance.running[name] = task
        task.add_done_callback(lambda _: instance.running.pop(name, None))

    async def _on_cancel(self, message: Msg) -> None:
        name = json.loads(message.data)["request_id"]
        for instance in self._instances.values():
            if name in instance.running:
                instance.running[name].cancel()

    async def _answer(self, instance: Instance, reply: str, count: int) -> None:
        async with instance.free:
            await self._stream(instance, reply, count)

    async def _stream(self, instance: Instance, reply: str, count: int) -> None:
        publish = self._mesh.nc.publish
        await publish(reply, InferStarted(prompt_tokens=PROMPT_TOKENS).model_dump_json().encode())
        async for i in schedule(count, instance.interval_s):
            await publish(reply, _CHUNK_HEAD % (i + 1) + _CHUNK_TAILS[i % len(WORDS)])
        last = InferChunk(seq=count + 1, choices=(ChoiceDelta(finish_reason="length"),))
        await publish(reply, last.model_dump_json().encode())
        usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=count, device_s=count * TOKEN_S)
        await publish(reply, InferFinished(seq=count + 2, usage=usage).model_dump_json().encode())


class HttpDoor:
    """An ASGI application that knows one route: a streamed chat completion."""

    def __init__(self, intervals: dict[str, float]) -> None:
        self._intervals = intervals
        self._events = {model: tuple(_event(model, {"content": w}) for w in WORDS) for model in intervals}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        request = json.loads(body)
        model, count = request["model"], request["max_tokens"]
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, _event(model, {"role": "assistant", "content": ""}))
        events = self._events[model]
        async for i in schedule(count, self._intervals[model]):
            await _send(send, events[i % len(WORDS)])
        await _send(send, _event(model, {}, "length"))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _send(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})


def _event(model: str, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    data = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None,
        "choices": [choice],
    }
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


async def serve(nats_url: str, port: int, pace_s: float, slots: int) -> None:
    intervals = {FREE: 0.0, PACED: pace_s}
    mesh = MeshDoor(nats_url, intervals, slots)
    await mesh.start()
    config = uvicorn.Config(
        HttpDoor(intervals), host="127.0.0.1", port=port, http="httptools", loop="none", lifespan="off", log_config=None,
        access_log=False, server_header=False, date_header=False,
    )  # fmt: skip
    announcing = asyncio.create_task(mesh.broadcast(), name="status")
    try:
        await uvicorn.Server(config).serve()
    finally:
        announcing.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pace", type=float, default=10.0, help="milliseconds between the tokens of a paced stream")
    parser.add_argument("--slots", type=int, default=_CAPACITY, help="streams that an instance runs at once")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.nats, options.port, options.pace / 1e3, options.slots))


if __name__ == "__main__":
    main()
