"""Real engines on a cpu device with memory of its own, under a real nodeagent and loader.

Units outlive their engine, also one that is killed. Engines outlive the loader.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import psutil
import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.loader import LoaderStatus
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, StartInstance
from shared.sizing import need_of
from tests.integration.nodeagent.harness import gone, running_node
from tests.integration.nodeagent.loaders import Loaders
from tests.support.engines import Engines
from tests.support.servers import NatsServer
from thaw.demo.models import make_demo_model
from weights.formats.checkpoint import open_checkpoint
from weights.formats.segment import lay_out
from weights.store.units import cut_units

pytestmark = pytest.mark.slow
CHANGED = "model.layers.3."
"""The part of the model that the fine-tune changes."""


def fine_tune(base: Path, tuned: Path) -> Path:
    """Copy a model, and change the tensors of one layer."""
    shutil.copytree(base, tuned)
    raw = bytearray((base / "model.safetensors").read_bytes())
    size = 8 + int.from_bytes(raw[:8], "little")
    for name, tensor in json.loads(raw[8:size]).items():
        if name.startswith(CHANGED):
            low, high = (size + n for n in tensor["data_offsets"])
            raw[low:high] = bytes(reversed(raw[low : low + 2])) + raw[low + 2 : high]
    (tuned / "model.safetensors").write_bytes(raw)
    return tuned


async def test_units_outlive_engines_and_engines_outlive_the_loader(nats_server: NatsServer, tmp_path: Path) -> None:
    base = make_demo_model(tmp_path / "base", "5m")
    whole = sum(u.nbytes for u in cut_units(lay_out(open_checkpoint(base), "").tensors, {}, ""))
    settings = {
        "THAW_ZYGOTE": "true",
        "THAW_ZYGOTE_MODULE": "services.engine.zygote",
        "THAW_ENGINE_THREADS": "1",
        "THAW_DEVICES": "cpu:0=2GiB,cpu:1=1GiB/separate",
        "THAW_DRAM_BYTES": "0",
    }
    async with running_node(nats_server.url, tmp_path, **settings) as node:
        await node.loader_off()
        loaders, engines = Loaders(node), Engines(node.mesh, node.name, nats_server.url, tmp_path)
        await node.mesh.listen(subjects.loader_status(node.name), LoaderStatus, loaders.hear).start()
        await loaders.start()

        async def tokens(instance_id: str) -> list[int]:
            stream = await engines.ask(instance_id, "completion", prompt="abc", max_tokens=6, temperature=0)
            await stream.last()
            assert len(stream.tokens()) == 6
            return stream.tokens()

        async def started(instance_id: str, card: ModelCard, device: str = "cpu:1") -> int:
            need = need_of(card)
            command = StartInstance(
                token=node.next_token(),
                plan_id="p",
                instance_id=instance_id,
                card=card,
                device_ids=(device,),
                reserve_bytes=need.total,
                kv_bytes=need.kv,
            )
            await node.mesh.request(subjects.node_command(node.name), command, Done)
            status = await node.reaches(instance_id, InstanceState.READY, InstanceState.FAILED, within=90)
            assert status.error is None, status.error
            return status.pids[0]

        try:
            card = await loaders.card("base", base)
            await started("host", card, "cpu:0")
            expected = await tokens("host")
            assert (await loaders.memory(lambda m: True)).copied_bytes == 0, "cpu:0 is unified"

            first = await started("first", card)
            assert await tokens("first") == expected
            one = await loaders.memory(lambda m: m.copied_bytes == whole)
            assert "-pages-" in Path(f"/proc/{first}/maps").read_text()
            psutil.Process(first).kill()
            await node.reaches("first", InstanceState.FAILED)
            assert (await loaders.memory(lambda m: not m.mapped_bytes)).reusable_bytes == one.mapped_bytes

            await started("second", card)
            assert await tokens("second") == expected
            two = await loaders.memory(lambda m: m.copied_bytes + m.reused_bytes == 2 * whole)
            assert (two.copied_bytes, two.mapped_bytes, two.reusable_bytes) == (one.copied_bytes, one.mapped_bytes, 0)

            tuned = await loaders.card("tuned", fine_tune(base, tmp_path / "tuned"))
            await started("tuned", tuned)
            both = await loaders.memory(lambda m: m.copied_bytes + m.reused_bytes == 3 * whole)
            assert both.copied_bytes - two.copied_bytes <= 0.4 * two.copied_bytes
            assert both.mapped_bytes <= 1.4 * two.mapped_bytes
            # Both book their whole need; what they share is charged once, and so is what a KV cache
            # may have beyond its floor.
            booked = need_of(card).total + need_of(tuned).total
            elastic = need_of(card).kv - need_of(card).kv_floor
            assert elastic > 0
            charged = booked - card.info.weights_bytes - tuned.info.weights_bytes + both.mapped_bytes - elastic
            assert charged < booked
            await node.until(lambda s: s.devices[1].reserved_bytes == charged)

            # Both KV caches have returned what they borrowed beyond their floors.
            floors = need_of(card).kv_floor + need_of(tuned).kv_floor
            await loaders.memory(lambda m: m.lent_bytes == floors)
            assert loaders.process is not None
            loaders.process.kill()
            loaders.process.wait()
            await loaders.start()
            # The pages of the weights and of both KV caches, which keep their floors.
            # A page more that a cache had borrowed when the loader ended is returned to it.
            again = await loaders.memory(lambda m: m.lent_bytes == both.mapped_bytes + floors)
            assert again.mapped_bytes == 0
            assert await tokens("second") == expected
            assert await asyncio.to_thread(node.stop_agent) == 0
        finally:
            assert loaders.process is not None
            loaders.process.terminate()
            assert await gone(loaders.process.pid)
            loaders.process.wait()
