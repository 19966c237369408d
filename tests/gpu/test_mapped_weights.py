"""A loader and an engine process that share GPU memory.

Run `python -m pytest tests/gpu`. The tests go from a checkpoint to tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.contracts import subjects
from shared.contracts.loader import AttachWeights, ReleaseWeights, WeightsAttached, WeightsReleased
from shared.contracts.models import ModelCard
from shared.contracts.node import WEIGHTS_ON_GPU, Capability, NodeStatus
from shared.contracts.segment import CudaIpcHandle
from shared.errors import DeviceMissing
from shared.messaging import Mesh
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.support.engines import Engines
from tests.support.servers import NatsServer
from thaw.demo.models import make_demo_model
from weights.devices.cuda_runtime import CudaRuntime, load_cuda

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def cuda() -> CudaRuntime:
    torch = pytest.importorskip("torch")
    try:
        found = load_cuda()
    except DeviceMissing as e:
        pytest.skip(e.message)
    if not torch.cuda.is_available():
        pytest.skip("torch here has no CUDA")
    return found


@pytest.fixture
def loader(cuda: CudaRuntime, nats_server: NatsServer, tmp_path: Path) -> Iterator[LoaderProcess]:
    process = LoaderProcess(nats_server.url, tmp_path / "home", "gpu-node")
    process.home.mkdir()
    process.start()
    yield process
    process.close()


async def answer(engines: Engines, card: ModelCard) -> tuple[str, list[int]]:
    """Return the instance of an engine on the GPU, and its greedy tokens."""
    start = engines.spec(card).model_copy(update={"device": DEVICE})
    engines.spawn(start)
    report = await engines.settled(start.instance_id)
    assert report.state == "ready", report.error
    stream = await engines.answer(start.instance_id, "completion", prompt="abc", max_tokens=16, temperature=0, ignore_eos=True)
    return start.instance_id, stream.tokens()


async def test_mapped_weights_equal_copied_ones_and_are_freed_with_their_engine(
    cuda: CudaRuntime, loader: LoaderProcess, mesh: Mesh, nats_server: NatsServer, tmp_path: Path
) -> None:
    client, engines = Client(mesh, loader.node), Engines(mesh, loader.node, nats_server.url, tmp_path)
    await client.until_served()
    await engines.start()
    card = await client.card(make_demo_model(tmp_path / "model", "60m"))
    command = subjects.loader_command(loader.node)
    try:
        copied, expected = await answer(engines, card)
        says = (Capability(name=WEIGHTS_ON_GPU, available=True),)
        status = NodeStatus(node=loader.node, boot_id="b", seq=1, devices=(), capabilities=says)
        await mesh.publish(subjects.node_status(loader.node), status)
        await client.release("nobody")
        mapped, tokens = await answer(engines, card)
        assert tokens == expected
        ask = AttachWeights(instance_id=mapped, card=card, until="complete", device=DEVICE, deadline_ms=30_000)
        attached = await mesh.request(command, ask, WeightsAttached)
        assert isinstance(attached.handle, CudaIpcHandle)
        assert attached.handle.nbytes == attached.total_bytes
    finally:
        engines.close()
    cuda.use(0)
    before = cuda.free_bytes()
    released = await mesh.request(command, ReleaseWeights(instance_id=mapped, deadline_ms=30_000), WeightsReleased)
    assert released.device_bytes == attached.total_bytes
    assert cuda.free_bytes() >= before + released.device_bytes
    assert (await mesh.request(command, ReleaseWeights(instance_id=copied, deadline_ms=30_000), WeightsReleased)).device_bytes == 0
