"""A loader in one process, with GPUs whose driver copies in host memory."""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Callable
from pathlib import Path

from services.loader.adapters.device_copies import Copies
from services.loader.adapters.reclaim import Reclaimer
from services.loader.adapters.run import Threads
from services.loader.adapters.runs import Runs
from services.loader.domain.events import Event
from shared.contracts.loader import AttachWeights, ReleaseWeights, WeightsAttached, WeightsReleased
from shared.contracts.models import ModelCard
from shared.contracts.node import WEIGHTS_ON_GPU, Capability, NodeOutline
from shared.contracts.segment import CudaIpcHandle
from tests.unit.loader.devices.fake_driver import FakeDriver
from tests.unit.loader.loader_bench import Bench
from weights.devices.opening import Devices
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory
from weights.store.node_devices import NodeDevices

GROUP = 2 * 1024 * 1024


class GpuBench(Bench):
    def __init__(self, home: Path, budget: int = 0) -> None:
        self.devices = self.open_devices()
        super().__init__(home)
        self.pool.close(unlink=True)
        self.pool = PoolMemory(self.records.pool_name, 8 * CHUNK_BYTES, on_populated=self.devices.pin, on_punch=self.devices.unpin)
        self.loader = self.another("boot", budget)

    def open_devices(self) -> Devices:
        self.driver = FakeDriver(devices=2)
        return Devices(lambda: self.driver, lambda *_: GROUP)

    def workers(self, emit: Callable[[Event], None]) -> tuple[Runs, Reclaimer]:
        copies = Copies(NodeDevices({}, self.devices), self.pool, emit)
        return Runs(self.pool, self.sources, emit, Threads(2, 2), copies=copies), Reclaimer(self.pool, emit)

    async def engines_may_map(self, *, yes: bool = True) -> None:
        capabilities = (Capability(name=WEIGHTS_ON_GPU, available=yes),)
        await self.loader.on_node_status(NodeOutline(node="n", capabilities=capabilities))

    async def on(self, device: str, instance: str, card: ModelCard) -> WeightsAttached:
        asked = AttachWeights(instance_id=instance, card=card, until="complete", device=device)
        found = await self.loader.handle(asked)
        assert isinstance(found, WeightsAttached)
        return found

    async def release(self, instance: str) -> WeightsReleased:
        found = await self.loader.handle(ReleaseWeights(instance_id=instance))
        assert isinstance(found, WeightsReleased)
        return found

    def in_host_memory(self, found: WeightsAttached) -> bytes:
        parts = [bytes(self.pool.view(e.offset, e.nbytes)) for e in found.extents]
        return b"".join(parts)

    def on_device(self, found: WeightsAttached) -> bytes:
        assert isinstance(found.handle, CudaIpcHandle)
        assert found.handle.nbytes == found.total_bytes
        return ctypes.string_at(self.driver.open(base64.b64decode(found.handle.ipc_handle)), found.total_bytes)
