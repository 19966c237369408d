"""Cards and start commands of the built-in engine."""

from __future__ import annotations

import asyncio

from shared.contracts import subjects
from shared.contracts.loader import Inspected, InspectModel, LoaderStatus
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import StartInstance
from shared.sizing import need_of
from tests.integration.nodeagent.harness import Node

EPOCH = 1 << 32


async def inspected(node: Node, spec: ModelSpec) -> ModelCard:
    ready = asyncio.Event()

    async def on_status(_: LoaderStatus) -> None:
        ready.set()

    await node.mesh.listen(subjects.loader_status(node.name), LoaderStatus, on_status).start()
    await asyncio.wait_for(ready.wait(), 60)
    answer = await node.mesh.request(subjects.loader_command(node.name), InspectModel(spec=spec), Inspected)
    return ModelCard(spec=spec, info=answer.info, created=0)


def start_of(card: ModelCard, instance_id: str) -> StartInstance:
    need = need_of(card)
    return StartInstance(
        token=EPOCH + 1,
        plan_id="p",
        instance_id=instance_id,
        card=card,
        device_ids=("cpu:0",),
        reserve_bytes=need.total,
        kv_bytes=need.kv,
        executor_bytes=need.executor,
    )
