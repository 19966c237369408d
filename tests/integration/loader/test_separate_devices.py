"""Loads onto separate cpu devices, over real NATS."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.loader import LoaderStatus
from shared.errors import InsufficientMemory
from tests.integration.loader.separate import read, separate_loader, write_model
from tests.support.servers import NatsServer
from tests.unit.scheduler.world import World
from weights.store.probe import SIZES
from weights.store.units import PAGE_BYTES

TENSORS = 10
MIB = 1024 * 1024


def _has_all(status: LoaderStatus, holder: str) -> bool:
    return any(holder in s.holders and s.loaded_bytes == s.total_bytes for s in status.segments)


async def test_a_fine_tune_reads_what_no_device_has(nats_server: NatsServer, tmp_path: Path) -> None:
    base, tuned = write_model(tmp_path / "base", range(TENSORS)), write_model(tmp_path / "tuned", range(2, TENSORS + 2))
    devices = "cpu:1=64MiB/separate@50GiB/s,cpu:2=64MiB/separate@cpu:1=50GiB/s"
    async with separate_loader(nats_server, tmp_path / "home", devices, "n-separate") as loader:
        client = loader.client
        first = read(await loader.attach("a", await client.card(base), "cpu:1"))
        before = await loader.until_copied(TENSORS, 0, read=TENSORS)
        assert [d.paced_bytes_per_second for d in before.memory] == [50.0 * 2**30, None]
        assert all(link.group_bytes in SIZES for link in before.links if link.link.startswith("bus:"))
        paced = {link.link for link in before.links if link.is_paced}
        assert paced == {"bus:cpu:1", "p2p:cpu:1>cpu:2", "p2p:cpu:2>cpu:1"}
        second = read(await loader.attach("b", await client.card(tuned), "cpu:1"))
        both = await loader.until_copied(TENSORS + 2, 0, read=TENSORS + 2)
        assert second[: 8 * PAGE_BYTES] == first[2 * PAGE_BYTES :]
        assert both.memory[0].mapped_bytes == (TENSORS + 2) * PAGE_BYTES
        assert 2 * PAGE_BYTES <= both.read_bytes - before.read_bytes < 3 * PAGE_BYTES
        assert read(await loader.attach("c", await client.card(tuned), "cpu:2")) == second
        last = await loader.until_copied(TENSORS + 2, TENSORS)
        assert last.memory[1].peer_bytes > TENSORS // 2 * PAGE_BYTES
        assert last.read_bytes - both.read_bytes < TENSORS // 2 * PAGE_BYTES, "the other device has all of it"
        for instance in "abc":
            await client.release(instance)


async def test_the_scheduler_predicts_a_copy_from_two_links_as_it_is_measured(nats_server: NatsServer, tmp_path: Path) -> None:
    base, tuned = write_model(tmp_path / "base", range(TENSORS)), write_model(tmp_path / "tuned", range(2, TENSORS + 2))
    devices = "cpu:1=64MiB/separate,cpu:2=64MiB/separate@2MiB/s@cpu:1=4MiB/s"
    async with separate_loader(nats_server, tmp_path / "home", devices, "n-predicted") as loader:
        card = await loader.client.card(base)
        await loader.attach("a", card, "cpu:1")
        # An engine without a device keeps the fine-tune in host memory, so that no disk counts.
        other = await loader.client.card(tuned, "tuned")
        await loader.client.attach("host", other)
        await loader.expect(card, other)
        status = await loader.until(lambda s: _has_all(s, "host") and len(s.memory[0].weights) == 2)
        world = World()
        world.node("n-predicted", 2**30, devices=("cpu:1", "cpu:2"))
        world.loader("n-predicted", status.memory, links=status.links, segments=status.segments)
        found = Forecast(world.state, other, world.now).predict(booking_of(world.state, "n-predicted", "cpu:2"), leaving=False)
        assert (found.source, found.peers, found.read_bytes) == ("dram", ("cpu:1",), 0)
        # 20 MiB over 6 MiB/s: both links end at about the same time.
        assert found.phases["load"] == pytest.approx(20 / 6 * 1e3 + 20, rel=0.01)
        assert found.peer_bytes == pytest.approx(13.3 * MIB, rel=0.01)
        began = time.monotonic()
        await loader.attach("b", other, "cpu:2")
        seconds = time.monotonic() - began
        copied = (await loader.until_copied(TENSORS, TENSORS)).memory[1]
        assert abs(copied.peer_bytes - found.peer_bytes) <= 3 * PAGE_BYTES, "what the prediction says, by whole units"
        assert seconds > 0.8 * (found.phases["load"] / 1e3 - 0.02), "paced links are never sooner than their pace"
        for instance in ("a", "b", "host"):
            await loader.client.release(instance)


async def test_a_fine_tune_without_hashes_needs_room_for_its_own_part_only(nats_server: NatsServer, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", range(TENSORS), hashed=False)
    tuned = write_model(tmp_path / "tuned", range(2, TENSORS + 2), hashed=False)
    large = write_model(tmp_path / "large", range(3, TENSORS + 6), hashed=False)
    async with separate_loader(nats_server, tmp_path / "home", "cpu:1=24MiB/separate", "n-unhashed") as loader:
        first = read(await loader.attach("a", await loader.client.card(base), "cpu:1"))
        second = read(await loader.attach("b", await loader.client.card(tuned, "tuned"), "cpu:1"))
        assert second[: 8 * PAGE_BYTES] == first[2 * PAGE_BYTES :]
        both = await loader.until(lambda s: s.memory[0].mapped_bytes == (TENSORS + 2) * PAGE_BYTES)
        assert both.memory[0].free_bytes == 0
        # Its content is known only as it is read; the device is full then.
        refused = await loader.attach("c", await loader.client.card(large, "large"), "cpu:1")
        assert refused.device_error is not None
        assert refused.device_error.code == InsufficientMemory.code
        for instance in "abc":
            await loader.client.release(instance)
        after = await loader.until_unmapped()
        assert after.memory[0].reusable_bytes == (TENSORS + 2) * PAGE_BYTES
