"""An engine on device memory that its loader owns.

The engine asks for it by device, serves from it, and exits when the loader is gone. Here the
device's memory is host memory.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import subjects
from shared.contracts.base import Message
from shared.contracts.inference import InferFinished
from shared.contracts.loader import AttachWeights, LoaderCommand, LoaderStatus, WeightsAttached
from shared.contracts.segment import CudaIpcHandle
from shared.messaging import Mesh
from tests.support.engines import Engines
from tests.support.segments import FakeLoader, card_of

WITHIN_S = 60.0


class GpuLoader(FakeLoader):
    """A loader that returns a memory handle to requests that name a device."""

    async def _answer(self, command: LoaderCommand) -> Message:
        found = await super()._answer(command)
        if not isinstance(command, AttachWeights) or not isinstance(found, WeightsAttached):
            return found
        assert command.device == "cuda:0"
        raw = base64.b64encode(found.segment.encode().ljust(64, b"\0")).decode()
        handle = CudaIpcHandle(device="cuda:0", nbytes=found.total_bytes, bus_id="0000:00:00.0", ipc_handle=raw)
        return found.model_copy(update={"handle": handle, "boot_id": "first"})


@pytest.mark.parametrize("gone", [{"boot_id": "second"}, {"boot_id": "first", "stopping": True}], ids=["restarted", "stopping"])
async def test_engine_serves_from_loader_memory_and_fails_with_its_loader(
    mesh: Mesh, engines: Engines, demo_directory: Path, gone: dict[str, Any]
) -> None:
    loader = GpuLoader(mesh, engines.node)
    await loader.start()
    start = engines.spec(card_of(demo_directory)).model_copy(update={"device": "cuda:0"})
    process = engines.spawn(start, "tests.support.engine_without_gpu")
    try:
        report = await engines.settled(start.instance_id)
        assert report.state == "ready", report.error
        stream = await engines.ask(start.instance_id, "completion", prompt="abc", max_tokens=3, temperature=0)
        assert isinstance(await stream.last(), InferFinished)
        status = subjects.loader_status(engines.node)
        await mesh.publish(status, LoaderStatus(node=engines.node, boot_id="first"))
        await mesh.publish(status, LoaderStatus(node=engines.node, **gone))
        report = await engines.reported(start.instance_id, lambda r: r.state == "failed")
        assert report.error is not None
        assert "loader" in report.error.message
        assert await asyncio.to_thread(process.wait, WITHIN_S) == 1
    finally:
        loader.close()
