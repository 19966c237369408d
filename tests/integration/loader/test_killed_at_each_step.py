"""Engine, nodeagent or loader is killed at each step of a load: the pages are exact again.

The loader stops itself at the step (tests/support/stopping_loader.py). The nodeagent is this test;
engines are processes that map the pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from nats.aio.msg import Msg

from shared.contracts import subjects
from shared.contracts.audit import AuditMemory, DeviceAudit, MemoryAudited
from shared.contracts.loader import AttachWeights, WeightsAttached
from shared.contracts.loader_socket import loader_socket
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, InstanceStatus, NodeStatus
from shared.contracts.segment import PagesHandle
from shared.errors import ThawError
from shared.mapping import map_extents
from shared.settings import NodeSettings
from tests.integration.loader.conftest import SHM, Client, LoaderProcess
from tests.support.stopping_loader import LENDING_STEPS, STEPS, VARIABLE
from tests.unit.loader.checkpoints import write_checkpoint
from tests.unit.loader.pools import mapper
from tests.unit.loader.store.borrowing_engine import Engine

PAGE_BYTES = 2 * 1024 * 1024
PAGES = 24
UNITS, CHANGED = 4, 1
"""Units of a page in each model; the fine-tune's own ones."""
WITHIN_S = 60.0


@pytest.fixture
def loader(loader: LoaderProcess, tmp_path: Path) -> LoaderProcess:
    """Start the loader again, with a separate device and the steps to stop at."""
    loader.end()
    loader.module = "tests.support.stopping_loader"
    loader.environment |= {"THAW_DEVICES": f"cpu:1={PAGES * 2}MiB/separate", VARIABLE: str(tmp_path / "stop")}
    loader.start()
    return loader


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Bed:
    """A loader whose steps can be stopped, the models, and the nodeagent's part."""

    def __init__(self, loader: LoaderProcess, client: Client, directory: Path) -> None:
        self.loader, self._client, self._directory = loader, client, directory
        self._command = subjects.loader_command(loader.node)
        self._status, self._child = asyncio.Event(), asyncio.Event()
        self.contents: dict[str, bytes] = {}
        self.cards: dict[str, ModelCard] = {}
        self._numbers = itertools.count(1)

    async def open(self) -> None:
        async def hear(_: Msg) -> None:
            self._status.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._child.set)
        await self._client.mesh.nc.subscribe(subjects.loader_status(self.loader.node), cb=hear)
        await self._write("base", list(range(UNITS)))

    async def _write(self, name: str, seeds: list[int]) -> None:
        arrays = [np.random.default_rng(seed).random(PAGE_BYTES // 4, dtype=np.float32) for seed in seeds]
        write_checkpoint(self._directory / name, {f"t{i}": a for i, a in enumerate(arrays)})
        self.contents[name] = b"".join(a.tobytes() for a in arrays)
        self.cards[name] = await self._client.card(self._directory / name, name)

    async def fine_tune(self) -> str:
        """Write a model of which all but the last units are the base's, and return its name."""
        name, own = f"tuned{len(self.cards)}", 100 * len(self.cards)
        await self._write(name, [*range(UNITS - CHANGED), *range(own, own + CHANGED)])
        return name

    def named(self, model: str) -> str:
        """Return a new instance of the model."""
        return f"{model}-{next(self._numbers)}"

    async def attach(self, instance: str) -> PagesHandle:
        name = instance.partition("-")[0]
        ask = AttachWeights(instance_id=instance, card=self.cards[name], until="complete", device="cpu:1", deadline_ms=60_000)
        found = await self._client.mesh.request(self._command, ask, WeightsAttached)
        assert isinstance(found.handle, PagesHandle), found.device_error
        return found.handle

    async def release(self, instance: str) -> None:
        await self._client.release(instance)

    async def listed(self, *instances: str) -> None:
        """Publish a nodeagent's status."""
        known = tuple(
            InstanceStatus(
                instance_id=i,
                plan_id="p",
                token=1,
                model="m",
                generation=1,
                revision="r",
                device_ids=("cpu:1",),
                state=InstanceState.READY,
            )
            for i in instances
        )
        status = NodeStatus(node=self.loader.node, boot_id="b", seq=1, devices=(), instances=known)
        await self._client.mesh.publish(subjects.node_status(self.loader.node), status)

    async def audit(self) -> DeviceAudit:
        audited = await self._client.mesh.request(self._command, AuditMemory(), MemoryAudited)
        [device] = audited.devices
        assert device.free_pages + device.mapped_pages + device.reusable_pages + device.lent_pages == device.total_pages == PAGES
        assert device.violations == ()
        return device

    async def until(self, wanted: Callable[[DeviceAudit], bool], *listed: str) -> DeviceAudit:
        """Wait for an audit as wanted, while the nodeagent lists these instances."""
        found = None
        try:
            async with asyncio.timeout(WITHIN_S):
                while True:
                    self._status.clear()
                    await self.listed(*listed)
                    if wanted(found := await self.audit()):
                        return found
                    await self._status.wait()
        except TimeoutError:
            raise AssertionError(f"still {found}\n{self.loader.log.read_text()[-3000:]}") from None

    async def restart(self) -> None:
        """Kill the stopped loader, and start the next one."""
        self.loader.end(signal.SIGKILL)
        self.loader.start()
        await self._client.until_served(self.loader)

    def stop_at(self, step: str) -> None:
        Path(self.loader.environment[VARIABLE]).write_text(step)

    async def stopped(self) -> int:
        """Wait until the loader has stopped itself, and return its pid."""
        assert self.loader.process is not None
        pid = self.loader.process.pid
        async with asyncio.timeout(WITHIN_S):
            while not is_stopped(pid):
                await self._child.wait()
                self._child.clear()
        return pid

    async def reach(self, step: str, tuned: str) -> tuple[int, asyncio.Task[object]]:
        """Load the fine-tune, and release it again if need be, until the loader stops at `step`."""
        if step == "release":
            await self.attach(tuned)
        self.stop_at(step)
        work: asyncio.Task[object] = asyncio.create_task(self.release(tuned) if step == "release" else self.attach(tuned))
        return await self.stopped(), work

    async def check(self, name: str) -> None:
        """Load the model once more, and compare every byte."""
        instance = self.named(name)
        handle = await self.attach(instance)
        mapped = map_extents(SHM / handle.file, handle.extents)
        try:
            assert b"".join(mapped[u.start : u.start + u.nbytes] for u in handle.units) == self.contents[name]
        finally:
            mapped.close()
        await self.release(instance)


@pytest.fixture
async def bed(loader: LoaderProcess, client: Client, tmp_path: Path) -> AsyncIterator[Bed]:
    bed = Bed(loader, client, tmp_path)
    await bed.open()
    yield bed
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
    with contextlib.suppress(ProcessLookupError):
        assert loader.process is not None
        os.kill(loader.process.pid, signal.SIGCONT)


def holds_only(instance: str, device: DeviceAudit) -> bool:
    return device.instances == (instance,) and device.mapped_pages == UNITS


@pytest.fixture
def socket(bed: Bed) -> Path:
    return loader_socket(NodeSettings(home=bed.loader.home, node=bed.loader.node).node_state)


def lends(pages: int, device: DeviceAudit) -> bool:
    """True if the borrower's process maps this number of lent pages, and no others are lent."""
    return (device.lent_pages, device.unclaimed_pages) == (pages, 0)


async def ended(work: asyncio.Task[object]) -> None:
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError, ThawError):
        await work


async def test_engine_or_agent_killed_at_each_step(bed: Bed) -> None:
    for step in STEPS:
        base, tuned = bed.named("base"), bed.named(await bed.fine_tune())
        handle = await bed.attach(base)
        with mapper(SHM / handle.file, handle.extents) as engine:
            loader, work = await bed.reach(step, tuned)
            # The nodeagent is killed: it releases nothing, and later lists one instance.
            os.kill(loader, signal.SIGCONT)
            found = await bed.until(partial(holds_only, base), base)
            assert found.processes == (engine.pid,), step
            await ended(work)

            model = await bed.fine_tune()
            tuned = bed.named(model)
            loader, work = await bed.reach(step, tuned)
            # The engines are killed: the nodeagent releases what they held.
            engine.kill()
            engine.wait()
            await ended(work)
            os.kill(loader, signal.SIGCONT)
            await asyncio.gather(bed.release(base), bed.release(tuned))
            found = await bed.until(lambda d: not d.instances and not d.mapped_pages)
            assert (found.lent_pages, found.held_back_pages, found.processes) == (0, 0, ()), step
        await bed.check("base")
        await bed.check(model)


async def test_loader_killed_at_each_step(bed: Bed) -> None:
    for step in STEPS:
        model = await bed.fine_tune()
        handle = await bed.attach(bed.named("base"))
        with mapper(SHM / handle.file, handle.extents) as engine:
            _, work = await bed.reach(step, bed.named(model))
            await ended(work)
            await bed.restart()
            found = await bed.audit()
            assert (found.lent_pages, found.mapped_pages) == (UNITS, 0), step
            await bed.check(model)
            engine.kill()
            engine.wait()
        await bed.until(lambda d: not d.instances and not d.lent_pages)
        await bed.check("base")


async def borrower(socket: Path) -> Engine:
    """Start a process that borrows: six pages, of which two are its floor."""
    engine = Engine(socket, 2, "cpu:1", None)
    await engine.reads("lent 2")
    engine.say("demand 6")
    await engine.reads("lent 6")
    return engine


async def change(bed: Bed, engine: Engine, step: str) -> int:
    """Let the borrower ask for three pages or return three, until the loader stops at `step`."""
    bed.stop_at(step)
    engine.say("demand 9" if step == "lend" else "give 3")
    return await bed.stopped()


async def test_borrower_killed_at_each_step(bed: Bed, socket: Path) -> None:
    for step in LENDING_STEPS:
        engine = await borrower(socket)
        found = await bed.until(partial(lends, 6))
        assert found.processes == (engine.process.pid,)
        loader = await change(bed, engine, step)
        engine.kill()
        os.kill(loader, signal.SIGCONT)
        found = await bed.until(lambda d: not d.lent_pages)
        assert (found.free_pages, found.processes) == (PAGES, ()), step


async def test_loader_killed_at_each_step_of_lending(bed: Bed, socket: Path) -> None:
    for step in LENDING_STEPS:
        engine = await borrower(socket)
        await change(bed, engine, step)
        await bed.restart()
        # It keeps the pages that it maps, and gets others from the new loader.
        wanted = 9 if step == "lend" else 6
        await engine.reads(f"lent {wanted}")
        found = await bed.until(partial(lends, wanted))
        assert found.processes == (engine.process.pid,), step
        engine.kill()
        found = await bed.until(lambda d: not d.lent_pages)
        assert (found.free_pages, found.processes) == (PAGES, ()), step
