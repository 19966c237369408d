"""A mesh without computing engines, over real NATS.

Fake instances speak the inference contract, and `FakeNode` announces them: it plays the nodeagent,
the engines and (with `answer_demand`) the scheduler. `behaviour` determines a fake engine's output.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg
from pydantic import SecretStr, TypeAdapter

from shared.contracts import subjects
from shared.contracts.base import Done, ErrorBody, Failure, Message
from shared.contracts.demand import Demand, DemandNoted, LoadFailed
from shared.contracts.engine import EngineLoad
from shared.contracts.inference import (
    ChoiceDelta,
    EmbeddingsFinished,
    InferChunk,
    InferData,
    InferEnd,
    InferFailed,
    InferFinished,
    InferRaw,
    InferReply,
    InferRequest,
    InferResponse,
    InferStarted,
    Usage,
)
from shared.contracts.migration import RequestsListed, RunningRequest
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import DeviceStatus, InstanceState, InstanceStatus, NodeStatus
from shared.contracts.phases import Phase, PhaseSpan
from shared.errors import InstanceDraining, NotFound, ThawError
from shared.messaging import Mesh
from shared.messaging.streams import catalog_bucket
from shared.settings import CommonSettings
from tests.support.patient_mesh import PatientMesh

DEVICE_S = 0.25
"""Seconds of the device that each response in tokens reports."""
WORDS = ("Hello", ",", " wor", "ld", "! ", "né", " 日本", "\n", '"q"')


def card_of(name: str, *, task: str = "generate", context: int = 2048, routes: tuple[str, ...] = (), **options: Any) -> ModelCard:
    spec = ModelSpec.model_validate({"name": name, "source": "/models/none"} | options)
    info = ModelInfo(
        source="/models/none",
        revision="0",
        architecture="Fake",
        model_type="fake",
        task="embed" if task == "embed" else "generate",
        weights_bytes=1000,
        parameters=1000,
        dtype="float32",
        context_length=context,
        kv_bytes_per_token=16,
        vocab_size=32_000,
    )
    return ModelCard(spec=spec, info=info, created=1_700_000_000, routes=routes)


@dataclass
class Run:
    """One request at a fake engine.

    `say` numbers and sends a message; `CancelInfer` sets `cancelled`.
    """

    engine: FakeEngine
    request: InferRequest
    reply: str
    seq: int = 0
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    yielding: asyncio.Event = field(default_factory=asyncio.Event)

    async def say(self, message: InferReply) -> None:
        numbered = message.model_copy(update={"seq": self.seq})
        self.seq += 1
        await self.engine.nc.publish(self.reply, numbered.model_dump_json().encode())
        async with self.engine.arrived:
            self.engine.arrived.notify_all()

    async def start(self, **fields: Any) -> None:
        phases = (PhaseSpan(phase=Phase.QUEUE, start_ms=-0.2, duration_ms=0.2, process="engine"),)
        await self.say(InferStarted(prompt_tokens=7, phases=phases, **fields))

    async def text(self, *texts: str, index: int = 0) -> None:
        for i, text in enumerate(texts):
            phases = (PhaseSpan(phase=Phase.PREFILL, start_ms=-0.5, duration_ms=0.5, process="engine"),) if self.seq == 1 else ()
            await self.say(InferChunk(seq=0, choices=(ChoiceDelta(index=index, text=text, token_ids=(i,)),), phases=phases))

    async def finish(self, tokens: int, index: int = 0) -> None:
        await self.say(InferChunk(seq=0, choices=(ChoiceDelta(index=index, finish_reason="stop"),)))
        await self.end(tokens)

    async def end(self, tokens: int) -> None:
        await self.say(InferFinished(seq=0, usage=Usage(prompt_tokens=7, completion_tokens=tokens, device_s=DEVICE_S)))

    async def respond(self, content_type: str, *parts: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send the head and some data of an HTTP response."""
        await self.say(InferResponse(status=status, content_type=content_type, headers=headers or {}))
        for part in parts:
            await self.data(part)

    async def data(self, part: bytes) -> None:
        await self.say(InferData(seq=0, data=base64.b64encode(part).decode()))

    async def close(self) -> None:
        await self.say(InferEnd(seq=0, usage=Usage(prompt_tokens=7, completion_tokens=3)))

    async def fail(self, error: ThawError, *, engine_lost: bool = False) -> None:
        await self.say(InferFailed(seq=0, error=error.body(), engine_lost=engine_lost))


Behaviour = Callable[[Run], Awaitable[None]]


async def speak(run: Run) -> None:
    """Respond as a well-behaved engine: all the words, or vectors."""
    if run.request.endpoint == "embedding":
        await run.start()
        given = run.request.body["input"]
        inputs = given if isinstance(given, list) else [given]
        vectors = tuple(base64.b64encode(struct.pack("<3f", i, 0.5, -1.0)).decode() for i, _ in enumerate(inputs))
        await run.say(EmbeddingsFinished(seq=0, dimensions=3, vectors=vectors, usage=Usage(prompt_tokens=7)))
        return
    await run.start()
    if run.request.endpoint == "other":
        await run.say(InferRaw(seq=0, body={"route": run.request.route, "asked": run.request.body}, usage=Usage(prompt_tokens=7)))
        return
    await run.text(*WORDS)
    await run.finish(len(WORDS))


async def drain(run: Run) -> None:
    """Refuse as a draining engine does."""
    await run.fail(InstanceDraining())


async def hang(run: Run) -> None:
    """Say the first word, then nothing until cancelled."""
    await run.start()
    await run.text(WORDS[0])
    await run.cancelled.wait()


async def stop_when_asked(run: Run | None) -> Message:
    """Answer `YieldInfer` as a well-behaved engine does."""
    if run is None:
        return Failure(error=NotFound("it is over").body())
    run.yielding.set()
    return Done()


class FakeEngine:
    """One instance, which records its requests.

    `yields` answers `YieldInfer`; if it is None, there is no reply.
    """

    def __init__(self, mesh: Mesh, model: str, behaviour: Behaviour = speak, capacity: int = 16) -> None:
        self.mesh, self.nc = mesh, mesh.nc
        self.id = uuid.uuid4().hex
        self.model = model
        self.behaviour = behaviour
        self.capacity = capacity
        self.state = InstanceState.LOADING
        self.error: ErrorBody | None = None
        self.phases: tuple[PhaseSpan, ...] = ()
        self.traceparent: str | None = None
        self.yields: Callable[[Run | None], Awaitable[Message]] | None = stop_when_asked
        self.requests: list[Run] = []
        self.cancelled: list[str] = []
        self.arrived = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[str, Run] = {}
        self._subscriptions: list[Any] = []

    async def listen(self) -> None:
        self._subscriptions = [
            await self.nc.subscribe(subjects.infer(self.id), cb=self._on_request),
            await self.nc.subscribe(subjects.engine_control(self.id), cb=self._on_control),
        ]
        await self.mesh.flush()

    async def vanish(self) -> None:
        """Stop listening and working, as a killed process does."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions = []
        for task in list(self._tasks):
            task.cancel()
        await self.mesh.flush()

    async def _on_request(self, message: Msg) -> None:
        run = Run(self, InferRequest.model_validate_json(message.data), message.reply)
        async with self.arrived:
            self.requests.append(run)
            self.arrived.notify_all()
        self._running[run.request.request_id] = run
        # A test that waited for this request may set another behaviour before the task starts.
        task = asyncio.create_task(self._run(run, self.behaviour))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, run: Run, behaviour: Behaviour) -> None:
        try:
            await behaviour(run)
        finally:
            self._running.pop(run.request.request_id, None)

    async def _on_control(self, message: Msg) -> None:
        order = json.loads(message.data)
        if order["kind"] == "list_requests":
            await message.respond(self._listed().model_dump_json().encode())
            return
        run = self._running.get(order["request_id"])
        if order["kind"] == "yield":
            if self.yields is not None:
                await message.respond((await self.yields(run)).model_dump_json().encode())
            return
        async with self.arrived:
            self.cancelled.append(order["request_id"])
            self.arrived.notify_all()
        if run is not None:
            run.cancelled.set()

    def _listed(self) -> RequestsListed:
        running = [
            RunningRequest(request_id=name, gateway_id=subjects.gateway_of(run.reply), prompt_tokens=7, generated_tokens=run.seq)
            for name, run in self._running.items()
        ]
        return RequestsListed(requests=tuple(running))

    async def until(self, true: Callable[[], bool], within: float = 60.0) -> None:
        """Wait until a message has made the condition true."""
        async with asyncio.timeout(within), self.arrived:
            await self.arrived.wait_for(true)

    def status(self) -> InstanceStatus:
        return InstanceStatus(
            instance_id=self.id,
            plan_id=f"plan-{self.model}",
            token=1,
            model=self.model,
            generation=1,
            revision="0",
            device_ids=("cpu:0",),
            state=self.state,
            phase=Phase.LOAD if self.state.starting else None,
            progress=0.5 if self.state.starting else 0.0,
            capacity=self.capacity,
            load=EngineLoad(active=len(self._running)),
            phases=self.phases,
            traceparent=self.traceparent,
            error=self.error,
        )


class FakeNode:
    """Announces engines; records the demand it receives; publishes the catalogue."""

    def __init__(self, nats_url: str, name: str = "fake") -> None:
        self.mesh = PatientMesh(CommonSettings(nats_url=SecretStr(nats_url)), f"test-{name}")
        self.name = name
        self.engines: dict[str, FakeEngine] = {}
        self.demand: list[Demand] = []
        self.on_demand: Callable[[Demand], Awaitable[Message]] | None = None
        self.received = asyncio.Condition()
        self._seq = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self, *cards: ModelCard, scheduler: bool = True) -> None:
        await self.mesh.start()
        bucket = await catalog_bucket(self.mesh.nc.jetstream())
        for card in cards:
            await bucket.put(subjects.token(card.name), card.model_dump_json().encode())
        if scheduler:
            await self.mesh.respond(subjects.DEMAND, TypeAdapter(Demand), self._demand, concurrent=True).start()
            await self.mesh.flush()
        self._task = asyncio.create_task(self._heartbeat())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for engine in self.engines.values():
            await engine.vanish()
        await self.mesh.stop()

    async def _demand(self, demand: Demand) -> Message:
        async with self.received:
            self.demand.append(demand)
            self.received.notify_all()
        if self.on_demand is not None:
            return await self.on_demand(demand)
        return DemandNoted(outlook="starting", plan_id="plan", eta_ms=1500)

    async def until_demand(self, true: Callable[[], bool], within: float = 60.0) -> None:
        async with asyncio.timeout(within), self.received:
            await self.received.wait_for(true)

    async def engine(self, model: str, behaviour: Behaviour = speak, *, ready: bool = True, capacity: int = 16) -> FakeEngine:
        engine = FakeEngine(self.mesh, model, behaviour, capacity)
        self.engines[engine.id] = engine
        await engine.listen()
        if ready:
            engine.state = InstanceState.READY
        await self.announce()
        return engine

    async def announce(self) -> None:
        """Broadcast the node's status now."""
        self._seq += 1
        device = DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=10**9, reserved_bytes=0)
        instances = tuple(e.status() for e in self.engines.values())
        status = NodeStatus(node=self.name, boot_id="boot", seq=self._seq, devices=(device,), instances=instances)
        await self.mesh.publish(subjects.node_status(self.name), status)
        await self.mesh.flush()

    async def load_failed(self, model: str, error: ThawError) -> None:
        await self.mesh.publish(subjects.LOAD_FAILED, LoadFailed(model=model, error=error.body()))
        await self.mesh.flush()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self.announce()
