"""Faults during loads onto separate devices: right bytes or a clear error, and no lost page."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from shared.contracts.segment import PagesHandle
from shared.errors import CheckpointInvalid, InsufficientMemory
from tests.integration.loader.separate import held_links, read, separate_loader, write_model
from tests.support.servers import NatsServer
from weights.pool.shm import SHM
from weights.store.units import PAGE_BYTES
from weights.transfer import reader

TENSORS = 6
DEVICES = "cpu:1=24MiB/separate,cpu:2=24MiB/separate"


async def test_a_read_error_midway_ends_the_load_and_the_next_one_succeeds(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = write_model(tmp_path / "base", range(TENSORS)), write_model(tmp_path / "tuned", range(3, TENSORS + 3))
    pread = reader._pread
    broken = True

    def failing(fd: int, into: memoryview, start: int, end: int, offset: int, flags: int = 0) -> int:
        if broken and offset + end > 4 * PAGE_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, into, start, end, offset, flags)

    monkeypatch.setattr(reader, "_pread", failing)
    async with separate_loader(nats_server, tmp_path / "home", DEVICES, "n-read-error") as loader:
        card = await loader.client.card(base)
        with pytest.raises(CheckpointInvalid, match="Input/output error"):
            await loader.attach("a", card, "cpu:1")
        await loader.until_unmapped()
        broken = False
        whole = read(await loader.attach("b", card, "cpu:1"))
        # The same while only missing units are read.
        broken = True
        other = await loader.client.card(tuned, "tuned")
        with pytest.raises(CheckpointInvalid, match="Input/output error"):
            await loader.attach("c", other, "cpu:1")
        after = await loader.until(lambda s: s.memory[0].mapped_bytes == TENSORS * PAGE_BYTES)
        assert after.memory[0].violations == ()
        broken = False
        assert read(await loader.attach("d", other, "cpu:1"))[: 3 * PAGE_BYTES] == whole[3 * PAGE_BYTES :]
        for instance in "abcd":
            await loader.client.release(instance)
        await loader.until_unmapped()


async def test_a_damaged_unit_of_another_device_is_read_from_the_source(nats_server: NatsServer, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", range(TENSORS))
    async with separate_loader(nats_server, tmp_path / "home", DEVICES, "n-damaged") as loader:
        card = await loader.client.card(base)
        first = await loader.attach("a", card, "cpu:1")
        before, content = await loader.until_copied(TENSORS, 0, read=TENSORS), read(first)
        assert isinstance(first.handle, PagesHandle)
        extent = first.handle.extents[-1]
        with (SHM / first.handle.file).open("r+b") as pages:
            pages.seek(extent.offset + extent.nbytes - PAGE_BYTES)
            pages.write(b"damaged")
        await loader.client.release("a")  # host memory does not have the weights any more
        assert read(await loader.attach("b", card, "cpu:2")) == content
        after = await loader.until_copied(TENSORS, TENSORS, read=TENSORS + 1)
        assert after.memory[1].peer_bytes <= (TENSORS - 1) * PAGE_BYTES
        assert after.read_bytes - before.read_bytes >= PAGE_BYTES
        await loader.client.release("b")
        await loader.until_unmapped()


async def test_units_are_copied_from_another_device_although_their_instance_has_ended(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    base, other = write_model(tmp_path / "base", range(TENSORS)), write_model(tmp_path / "other", range(20, 32))
    # Both links are held, so that the copy lasts while the holder ends and others want its pages.
    devices = "cpu:1=24MiB/separate,cpu:2=24MiB/separate@50MiB/s@cpu:1=50MiB/s"
    async with separate_loader(nats_server, tmp_path / "home", devices, "n-holder-gone") as loader:
        card, wanted = await loader.client.card(base), await loader.client.card(other, "other")
        content = read(await loader.attach("a", card, "cpu:1"))
        await loader.until_copied(TENSORS, 0)
        async with asyncio.TaskGroup() as tasks:
            with held_links():
                copying = tasks.create_task(loader.attach("b", card, "cpu:2"))
                await loader.until(lambda s: s.memory[1].mapped_bytes > 0)
                await loader.client.release("a")
                held = await loader.until(lambda s: not any("a" in x.holders for x in s.segments))
                assert held.memory[0].mapped_bytes > 0, "the copy holds its units"
                refused = await loader.attach("c", wanted, "cpu:1")
                assert refused.device_error is not None
                assert refused.device_error.code == InsufficientMemory.code
        assert read(copying.result()) == content
        await loader.client.release("c")
        after = await loader.until(lambda s: s.memory[0].mapped_bytes == 0)
        assert after.memory[0].violations == after.memory[1].violations == ()
        await loader.client.release("b")
        await loader.until_unmapped()
