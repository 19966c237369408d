"""Engines on a GPU under a nodeagent: suspended and resumed.

NVML reports the freed bytes, the greedy tokens stay the same, and milliseconds are printed with
bytes.

    THAW_TEST_VLLM_PYTHON=PYTHON python -m pytest tests/gpu/test_engine_suspend.py -s

The built-in engine needs a CUDA build of torch here; vLLM's interpreter is named by the variable,
and without it vLLM is skipped.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.nodeagent.devices.cuda import CudaDevice, load_nvml
from services.nodeagent.suspend.cuda import open_driver
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.inference import INFER_REPLY, InferChunk, InferData, InferEnd, InferFailed, InferFinished, InferRequest
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import InstanceState, StartInstance
from shared.sizing import need_of
from tests.integration.nodeagent.harness import Node, gone, running_node
from tests.integration.nodeagent.real_engines import inspected
from tests.support.hosted import hosted_card
from tests.support.servers import NatsServer
from thaw.demo.models import make_demo_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
DEVICE = "cuda:0"
MIB, GIB = 1 << 20, 1 << 30
START_WITHIN_S = 600.0
VLLM_BYTES, VLLM_KV_BYTES = 8 * GIB, 2 * GIB
PROMPT: dict[str, Any] = {"prompt": "once upon a time", "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    nvml = load_nvml()
    if nvml is None or nvml.nvmlDeviceGetCount() == 0:
        pytest.skip("no NVIDIA driver, or no device that NVML can see")
    _, reason = open_driver(nvml)
    if reason:
        pytest.skip(reason)
    return CudaDevice(nvml, 0, 0.9, None)


@pytest.fixture
async def node(device: CudaDevice, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Node]:
    settings = {"THAW_DEVICES": f"{DEVICE}=90%", "THAW_ENGINE_MODULE": "services.engine", "PATH": os.environ["PATH"]}
    if python := os.environ.get("THAW_TEST_VLLM_PYTHON"):
        settings["THAW_VLLM_PYTHON"] = python
    async with running_node(nats_server.url, tmp_path, **settings) as found:
        yield found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("gpu") / "250m", "250m")


async def greedy_answer(node: Node, instance_id: str) -> str:
    """Return the greedy response of any engine: its token ids, or its bytes."""
    inbox = node.mesh.nc.new_inbox()
    found: list[str] = []
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def on_message(message: Any) -> None:
        match INFER_REPLY.validate_json(message.data):
            case InferChunk(choices=choices):
                found.extend(str(t) for c in choices for t in c.token_ids)
            case InferData(progress=progress):
                found.extend(str(t) for c in progress for t in c.token_ids)
            case InferFailed(error=error):
                ended.set_exception(AssertionError(error))
            case InferEnd() | InferFinished():
                ended.set_result(None)

    subscription = await node.mesh.nc.subscribe(inbox, cb=on_message)
    request = InferRequest(
        request_id=uuid.uuid4().hex,
        instance_id=instance_id,
        model="demo",
        endpoint="completion",
        body={"model": "demo", **PROMPT},
        deadline_ms=120_000,
    )
    await node.mesh.nc.publish(subjects.infer(instance_id), request.model_dump_json().encode(), reply=inbox)
    async with asyncio.timeout(120):
        await ended
    await subscription.unsubscribe()
    assert found
    return " ".join(found)


async def swapped(node: Node, device: CudaDevice, card: ModelCard, reserve: int, kv: int) -> None:
    """Start an engine; suspend and resume it three times."""
    name = f"i{uuid.uuid4().hex[:8]}"
    command = StartInstance(
        token=node.next_token(),
        plan_id="p",
        instance_id=name,
        card=card,
        device_ids=(DEVICE,),
        reserve_bytes=reserve,
        kv_bytes=kv,
    )
    await node.mesh.request(subjects.node_command(node.name), command, Done)
    status = await node.reaches(name, InstanceState.READY, InstanceState.FAILED, within=START_WITHIN_S)
    assert status.state is InstanceState.READY, status.error
    await node.until(lambda s: any(i.instance_id == name and i.suspension.possible for i in s.instances), 60)
    before, pids = await greedy_answer(node, name), node.instance(name).pids
    for _ in range(3):
        used = device.used_bytes(0, 0)
        await node.suspend(name)
        status = await node.reaches(name, InstanceState.SUSPENDED, InstanceState.STOPPED, InstanceState.FAILED, within=120)
        assert status.state is InstanceState.SUSPENDED, status.error
        freed = used - device.used_bytes(0, 0)
        assert freed >= 0.75 * (status.suspension.freed_bytes + status.suspension.left_bytes), "the device itself says so"
        await node.resume(name)
        status = await node.reaches(name, InstanceState.READY, InstanceState.FAILED, within=120)
        assert status.suspension.fell_back is None
        assert status.pids == pids
        assert await greedy_answer(node, name) == before
        assert status.suspended is not None
        assert status.resumed is not None
        assert status.started is not None
        sys.stdout.write(
            f"{card.spec.engine} by {status.suspension.way}: {freed / MIB:.0f} MiB freed; started in {status.started.took_ms:.0f} ms, "
            f"suspended in {status.suspended.took_ms:.0f}, resumed in {status.resumed.took_ms:.0f} "
            f"({freed / status.resumed.took_ms / 1e6:.1f} GB/s)\n"
        )


async def test_builtin_engine_is_suspended_and_resumed(node: Node, device: CudaDevice, source: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch here has no CUDA")
    await node.loader_off()
    loader = node.spawn_loader()
    try:
        card = await inspected(node, ModelSpec(name="demo", source=str(source)))
        need = need_of(card)
        await swapped(node, device, card, need.total, need.kv)
    finally:
        loader.terminate()
        assert await gone(loader.pid)
        loader.wait()


async def test_vllm_is_suspended_and_resumed(node: Node, device: CudaDevice, source: Path) -> None:
    if not os.environ.get("THAW_TEST_VLLM_PYTHON"):
        pytest.skip("THAW_TEST_VLLM_PYTHON names no interpreter")
    await swapped(node, device, hosted_card(source, "vllm", context=1024), VLLM_BYTES, VLLM_KV_BYTES)
