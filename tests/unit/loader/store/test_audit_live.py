"""The loader's audit of a device that keeps units: on request, and after changes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.loader import auditing
from services.loader.domain.ownership import Arenas, unowned_arenas
from services.loader.domain.state import State
from services.loader.local_socket import LocalReaders, listening
from services.loader.loop import Loop
from shared.contracts.audit import AuditMemory, DeviceAudit, MemoryAudited
from shared.contracts.segment import Extent, PagesHandle
from tests.unit.loader.pools import mapper
from tests.unit.loader.store.audit_snapshots import snapshot
from tests.unit.loader.store.separate_bench import BENCHES, PAGES, TENSORS, SeparateBench, model
from tests.unit.loader.store.separate_devices import Model, load
from weights.client import audit_memory
from weights.pool import shm
from weights.store import separate
from weights.store.auditing import Audit
from weights.store.units import PAGE_BYTES


@pytest.fixture(params=BENCHES, ids=["cpu", "gpu"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SeparateBench]:
    monkeypatch.setattr(auditing, "_CONFIRM_AFTER_S", 0.0)
    monkeypatch.setattr(auditing, "_BETWEEN_AUDITS_S", 0.0)
    bench: SeparateBench = request.param(tmp_path / "home")
    await bench.start()
    yield bench
    await bench.stop()


async def audited(bench: SeparateBench) -> DeviceAudit:
    found = await bench.loader.handle(AuditMemory())
    assert isinstance(found, MemoryAudited)
    [device] = found.devices
    assert device.free_pages + device.mapped_pages + device.reusable_pages + device.lent_pages == device.total_pages == PAGES
    return device


async def test_a_load_and_its_release_are_conserved(bench: SeparateBench, tmp_path: Path) -> None:
    await bench.on_device("a", await model(bench, tmp_path / "m"))
    during = await audited(bench)
    assert (during.mapped_pages, during.reusable_pages, during.instances) == (TENSORS, 0, ("a",))
    await bench.release("a")
    after = await audited(bench)
    assert (after.mapped_pages, after.reusable_pages, after.instances) == (0, TENSORS, ())
    assert (during.violations, after.violations) == ((), ())


@pytest.mark.parametrize("bench", BENCHES[:1], indirect=True)  # of a GPU: test_gpu_units_live
async def test_mappings_of_processes_are_compared_with_the_records(bench: SeparateBench, tmp_path: Path) -> None:
    attached = await bench.on_device("a", await model(bench, tmp_path / "m"))
    assert isinstance(attached.handle, PagesHandle)
    await bench.release("a")
    path = shm.SHM / attached.handle.file
    with mapper(path, attached.handle.extents[:1]) as engine:
        found = await audited(bench)
        assert (found.violations, found.processes) == ((), (engine.pid,))
        assert found.held_back_pages == attached.handle.extents[0].nbytes // PAGE_BYTES
    free = bench.device.snapshot().store.free[0]
    with mapper(path, [Extent(offset=free * PAGE_BYTES, nbytes=PAGE_BYTES)]) as intruder:
        assert (await audited(bench)).violations == (f"page {free} is free, and processes {intruder.pid} map it",)
        assert bench.memory().violations, "the next status has them"
    assert (await audited(bench)).violations == ()


async def test_an_arena_that_no_load_uses_is_a_violation(bench: SeparateBench, caplog: pytest.LogCaptureFixture) -> None:
    leaked = bench.device.allocate(Model("leaked", 1).place())
    keeping = asyncio.create_task(bench.loader.keep_audited())
    async with asyncio.timeout(60):
        while not bench.memory().violations:
            await bench.loader.changed.wait()
    assert bench.memory().violations == (f"{leaked.holder} is open, and no load uses it",)
    assert "device memory is not conserved" in caplog.text
    leaked.release()
    assert (await audited(bench)).violations == ()
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping


@pytest.mark.parametrize("method", ["allocate", "remove"])
async def test_an_arena_that_is_opened_or_released_is_no_violation(
    bench: SeparateBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Both may take longer than the time between two audits: they wait for copies."""
    original, reached, proceed = getattr(bench.device, method), threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        if method == "remove":
            reached.set()
            proceed.wait(60)
        found = original(*arguments)
        if method == "allocate":
            reached.set()
            proceed.wait(60)
        return found

    monkeypatch.setattr(bench.device, method, slow)
    work: asyncio.Task[Any] = asyncio.create_task(bench.on_device("a", await model(bench, tmp_path / "m")))
    if method == "remove":
        await work
        work = asyncio.create_task(bench.release("a"))
    try:
        assert await asyncio.to_thread(reached.wait, 60)
        assert (await audited(bench)).violations == ()
    finally:
        proceed.set()
    await work
    assert (await audited(bench)).violations == ()


def test_an_arena_without_an_entry_belongs_to_no_instance() -> None:
    assert unowned_arenas(State(), {"arena-1": ("w", 1)}) == ["arena-1 of w belongs to no instance"]


async def test_an_arena_that_fails_to_open_frees_its_reservation(bench: SeparateBench, monkeypatch: pytest.MonkeyPatch) -> None:
    held = load(bench.device, Model("m", 1, 2))

    def fail(*_: object) -> str:
        raise OSError("the pages cannot be read")

    monkeypatch.setattr(separate, "key_on_device", fail)
    with pytest.raises(OSError, match="cannot be read"):
        bench.device.allocate(Model("n", 1, 3).place())
    held.release()
    found = await audited(bench)
    assert (found.mapped_pages, found.violations) == (0, ())


async def test_the_local_socket_answers_audits(bench: SeparateBench, tmp_path: Path) -> None:
    async with listening(tmp_path / "loader.sock", LocalReaders(bench.loader, shm.SHM, "socket")):
        [device] = await asyncio.to_thread(audit_memory, tmp_path / "loader.sock", 30.0)
    assert (device.device_id, device.free_pages, device.violations) == (bench.DEVICE, PAGES, ())


async def test_a_device_that_is_opened_during_an_audit_has_no_confirmed_violation() -> None:
    """The first audit found a violation; a GPU is opened by its first load before the second."""
    device = snapshot()
    bad = Audit(device, violations=("page 1 is nowhere",))
    found_bad: tuple[Audit, Arenas] = (bad, {})
    audits = iter([{"cpu:1": found_bad}, {"cpu:1": found_bad, "cuda:0": found_bad}])
    copies = SimpleNamespace(audit=lambda: next(audits))
    loop = SimpleNamespace(runs=SimpleNamespace(copies=copies), state=State(), changed=asyncio.Event())
    found = await auditing.Auditor(cast(Loop, loop)).audit()
    assert [d.violations for d in found] == [("page 1 is nowhere",), ()]
