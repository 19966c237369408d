"""One `PrepareWeights` for a device set: each device's part at the same time, over its own link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.loader import AttachWeights, PrepareWeights, WeightsAttached
from shared.contracts.segment import HEADER_BYTES, PagesHandle, SegmentHeader, SegmentIndex
from shared.contracts.stages import DevicePart, LayerRange, RankOf, part_id, split_layers
from shared.mapping import map_extents
from tests.integration.loader.separate import SeparateLoader, held_links, separate_loader
from tests.support.servers import NatsServer
from tests.unit.loader.checkpoints import CONFIG, write_checkpoint
from weights.pool.shm import SHM

DEVICES = ("cpu:1", "cpu:2")
LINK = "50MiB/s"
HIDDEN = 1024
LLAMA = {**CONFIG, "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8}


def write(directory: Path) -> dict[str, Any]:
    """Write a model of two layers: 16 MiB that ranks divide, and 4 MiB that they do not."""
    random = np.random.default_rng(1)
    shapes = {
        f"model.layers.{layer}.{part}.weight": (HIDDEN, HIDDEN // 2)
        for layer in range(2)
        for part in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.v_proj", "self_attn.o_proj")
    }
    return write_checkpoint(directory, {n: random.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}, config=LLAMA)


async def prepare_and_attach(loader: SeparateLoader, directory: Path, parts: tuple[DevicePart, ...]) -> list[WeightsAttached]:
    card = await loader.client.card(directory)
    order = PrepareWeights(token=1, instance_id="i", card=card, parts=parts)
    buses = {f"bus:{p.device}" for p in parts}
    with held_links():
        await loader.mesh.request(subjects.loader_command(loader.node), order, Done)
        loading = await loader.until(lambda status: {link.link for link in status.links if link.loads} >= buses)
    assert {s.weights_id for s in loading.segments} == {part_id(card.info.revision, p.layers, p.rank) for p in parts}
    found = []
    for p in parts:
        ask = AttachWeights(
            instance_id=p.holder, card=card, until="complete", device=p.device, layers=p.layers, rank=p.rank, deadline_ms=60_000
        )
        found.append(await loader.mesh.request(subjects.loader_command(loader.node), ask, WeightsAttached))
    return found


def tensors_on_device(found: WeightsAttached) -> dict[str, tuple[Any, int]]:
    """Return each tensor on the device, and its first row in the whole one."""
    assert isinstance(found.handle, PagesHandle), found.device_error
    head = map_extents(SHM / found.segment, found.extents)
    memory = map_extents(SHM / found.handle.file, found.handle.extents)
    try:
        header = SegmentHeader.model_validate_json(head[:HEADER_BYTES].rstrip(b"\0"))
        index = SegmentIndex.model_validate_json(head[header.index_offset : header.index_offset + header.index_bytes])
        there = {}
        for t in index.tensors:
            unit = next(u for u in found.handle.units if u.offset <= t.offset and t.offset + t.nbytes <= u.offset + u.nbytes)
            start = unit.start + t.offset - unit.offset
            data = np.frombuffer(memory[start : start + t.nbytes], np.float32).reshape(t.shape)
            there[t.name] = data, (t.cut.start if t.cut is not None else 0)
        return there
    finally:
        head.close()
        memory.close()


@pytest.mark.parametrize("division", ["ranks", "stages"])
async def test_each_device_gets_its_part_at_the_same_time(nats_server: NatsServer, tmp_path: Path, division: str) -> None:
    weights = write(tmp_path / "m")
    ranks: list[RankOf | None] = [RankOf(index=i, count=2) for i in range(2)] if division == "ranks" else [None, None]
    layers: tuple[LayerRange | None, ...] = (None, None) if division == "ranks" else split_layers(2, 2)
    parts = tuple(
        DevicePart(holder=holder, device=device, layers=at, rank=rank)
        for holder, device, at, rank in zip(("i", "i+s1"), DEVICES, layers, ranks, strict=True)
    )
    devices = ",".join(f"{d}=64MiB/separate@{LINK}" for d in DEVICES)
    async with separate_loader(nats_server, tmp_path / "home", devices, f"parts-{division}") as loader:
        found = await prepare_and_attach(loader, tmp_path / "m", parts)
        covered: dict[str, set[int]] = {n: set() for n in weights}
        for attached in found:
            for name, (rows, first) in tensors_on_device(attached).items():
                assert (rows == weights[name][first : first + len(rows)]).all()
                covered[name] |= set(range(first, first + len(rows)))
        assert all(covered[name] == set(range(len(w))) for name, w in weights.items())
        whole = sum(w.nbytes for w in weights.values())
        share = {"ranks": 0.6, "stages": 0.5}[division]
        for attached in found:
            assert isinstance(attached.handle, PagesHandle)
            assert abs(sum(u.nbytes for u in attached.handle.units) / whole - share) < 0.05
