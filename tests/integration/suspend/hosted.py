"""Real engines under a real nodeagent: started, requested, assessed."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from typing import Any

import psutil

from services.nodeagent.suspend.memory import footprint
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.inference import INFER_REPLY, InferData, InferEnd, InferFailed, InferRaw, InferRequest
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, InstanceStatus, StartInstance
from tests.integration.nodeagent.harness import MIB, Node

READY_WITHIN_S = 300.0


async def start_hosted(
    node: Node,
    card: ModelCard,
    *,
    mib: int,
    park: bool = False,
    within: float = READY_WITHIN_S,
    template: str | None = None,
) -> InstanceStatus:
    """Start an instance that its node can suspend, or a parked one.

    Args:
        template: The suspended instance whose engine it takes.
    """
    command = StartInstance(
        token=node.next_token(),
        plan_id="p1",
        instance_id=f"i{uuid.uuid4().hex[:8]}",
        card=card,
        device_ids=("cpu:0",),
        reserve_bytes=mib * MIB,
        kv_bytes=64 * MIB,
        park=park,
        template=template,
    )
    await node.mesh.request(subjects.node_command(node.name), command, Done)
    wanted = InstanceState.SUSPENDED if park else InstanceState.READY
    await node.reaches(command.instance_id, wanted, InstanceState.FAILED, within=within)
    status = node.instance(command.instance_id)
    assert status.state is wanted, status.error
    if not park:
        await node.until(lambda s: any(i.instance_id == command.instance_id and i.suspension.possible for i in s.instances))
    return node.instance(command.instance_id)


async def generate(node: Node, instance_id: str, prompt: str = "once upon a time", tokens: int = 16) -> str:
    """Return greedy text, through the mesh."""
    inbox = node.mesh.nc.new_inbox()
    parts: list[bytes] = []
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def on_message(message: Any) -> None:
        reply = INFER_REPLY.validate_json(message.data)
        if isinstance(reply, InferData):
            parts.append(base64.b64decode(reply.data))
        elif isinstance(reply, InferRaw):
            parts.append(json.dumps(reply.body).encode())
        if isinstance(reply, InferEnd | InferRaw | InferFailed) and not ended.done():
            ended.set_exception(AssertionError(reply)) if isinstance(reply, InferFailed) else ended.set_result(None)

    subscription = await node.mesh.nc.subscribe(inbox, cb=on_message)
    request = InferRequest(
        request_id=uuid.uuid4().hex,
        instance_id=instance_id,
        model="demo",
        endpoint="completion",
        body={"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True},
        deadline_ms=60_000,
    )
    await node.mesh.nc.publish(subjects.infer(instance_id), request.model_dump_json().encode(), reply=inbox)
    async with asyncio.timeout(60):
        await ended
    await subscription.unsubscribe()
    text: str = json.loads(b"".join(parts))["choices"][0]["text"]
    return text


def engine_pids(node: Node, instance_id: str) -> tuple[int, ...]:
    """Return the engine's pids, without its host's."""
    return node.instance(instance_id).pids[1:]


def pss(node: Node, instance_id: str) -> int:
    return footprint(engine_pids(node, instance_id)).pss


def descriptors(pids: tuple[int, ...]) -> int:
    return sum(psutil.Process(pid).num_fds() for pid in pids)
