"""A node whose models share one engine process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import InstanceState, InstanceStatus
from tests.integration.nodeagent.harness import Node, gone, running_node
from tests.integration.nodeagent.real_engines import inspected, start_of
from thaw.demo.models import make_demo_model

ASKED: dict[str, Any] = {"prompt": "once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@asynccontextmanager
async def shared_node(url: str, directory: Path, **more: str) -> AsyncIterator[tuple[Node, list[ModelCard]]]:
    """Yield a node with a loader, and the cards of two shared models."""
    sources = [make_demo_model(directory / f"m{seed}", "test", seed) for seed in (1, 2)]
    settings = {
        "THAW_ZYGOTE": "true",
        "THAW_ZYGOTE_MODULE": "services.engine.zygote",
        "THAW_ENGINE_THREADS": "1",
        "THAW_DEVICES": "cpu:0=2GiB",
        **more,
    }
    async with running_node(url, directory, **settings) as node:
        await node.loader_off()
        loader = node.spawn_loader()
        try:
            specs = [ModelSpec(name=s.name, source=str(s), isolation="shared") for s in sources]
            yield node, [await inspected(node, spec) for spec in specs]
            assert await asyncio.to_thread(node.stop_agent) == 0
        finally:
            loader.terminate()
            assert await gone(loader.pid)
            loader.wait()


async def started(node: Node, card: ModelCard, instance_id: str) -> InstanceStatus:
    await node.mesh.request(subjects.node_command(node.name), start_of(card, instance_id), Done)
    status = await node.reaches(instance_id, InstanceState.READY, InstanceState.FAILED, within=90)
    assert status.error is None
    return status
