"""Pages lent to KV caches: loads wait for borrowers to shrink, and nothing is lent twice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import EngineFailed, InsufficientMemory
from tests.support.stopping import killed_at_exit
from tests.unit.loader.pools import ROOT
from tests.unit.loader.store.borrowers import BORROWER, borrower
from tests.unit.loader.store.gpu import Gpus
from tests.unit.loader.store.separate_devices import COUNT, Model, load, made
from weights.pool.shm import SHM
from weights.store.gpu_memory import GpuMemory
from weights.store.lending import Borrower, Turn, shrink_targets
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

CLAIM = f"""
import mmap, os, sys
from shared.file_locks import lock_mapped
fd = os.open(sys.argv[1], os.O_RDWR)
if sys.argv[3:] == ["--lock"]:
    lock_mapped(fd, int(sys.argv[2]) * {PAGE_BYTES}, {PAGE_BYTES})
claim = mmap.mmap(fd, {PAGE_BYTES}, prot=0, offset=int(sys.argv[2]) * {PAGE_BYTES})
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, gpus: Gpus) -> Iterator[SeparateDevice]:
    on_gpu = request.param == "gpu"
    device = gpus.get("cuda:0") if on_gpu else made()
    yield device
    assert device.audit() == []
    if not on_gpu:
        device.close()


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    gpus = Gpus(COUNT, lends_kv=True)
    BORROWER[0] = gpus.exited.pid
    yield gpus
    gpus.close()


def allocated_bytes(device: SeparateDevice) -> int:
    if isinstance(device.memory, GpuMemory):
        return device.memory.allocated_bytes()
    return (SHM / device.file).stat().st_blocks * 512


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 9), st.integers(0, 9))), st.integers(0, 40))
def test_shrinking_gives_what_is_short_and_leaves_the_floors(parts: dict[str, tuple[int, int]], short: int) -> None:
    held, floors = {b: h for b, (h, _) in parts.items()}, {b: f for b, (_, f) in parts.items()}
    targets = shrink_targets(held, floors, short)
    assert all(floors[b] <= keep < held[b] for b, keep in targets.items())
    possible = sum(max(0, held[b] - floors[b]) for b in parts)
    assert sum(held[b] - keep for b, keep in targets.items()) == min(short, possible)


def test_reusable_units_are_reclaimed_for_a_cache(device: SeparateDevice) -> None:
    arena = load(device, Model("a", 1, 2, 3))
    arena.wait(arena.nbytes)
    mapped = device.pages().mapped_bytes // PAGE_BYTES
    device.lender.open("kv", borrower(1))
    assert len(device.lender.lend("kv", COUNT)) == COUNT - mapped  # mapped units stay
    arena.release()
    assert len(device.lender.lend("kv", COUNT)) == mapped
    assert device.pages().lent_bytes == COUNT * PAGE_BYTES
    assert device.lender.take_back("kv") == 0
    assert device.pages().free_bytes == COUNT * PAGE_BYTES


def test_a_lent_page_has_no_memory_in_the_pool(device: SeparateDevice) -> None:
    arena = load(device, Model("a", 1, 2, 3))
    arena.wait(arena.nbytes)
    arena.release()
    before = allocated_bytes(device)
    device.lender.open("kv", borrower(0))
    device.lender.lend("kv", COUNT)
    assert before >= 3 * PAGE_BYTES
    assert allocated_bytes(device) == 0


def test_a_load_waits_until_a_borrower_has_shrunk(device: SeparateDevice) -> None:
    lender, asked = device.lender, threading.Event()
    lender.open("kv", borrower(2))
    lender.lend("kv", COUNT)

    def shrink() -> None:
        assert asked.wait(30)
        keep = lender.target("kv")
        assert keep is not None
        assert keep >= 2
        assert lender.lend("kv", COUNT) == ()  # nothing beyond the floor while a load lacks pages
        lender.take_back("kv", range(COUNT - keep))

    lender.on_change = asked.set
    thread = threading.Thread(target=shrink)
    thread.start()
    arena = load(device, Model("a", 1, 2, 3))
    thread.join()
    assert arena.wait(arena.nbytes)
    assert lender.target("kv") is None
    arena.release()


def test_a_load_does_not_wait_for_booked_pages(device: SeparateDevice) -> None:
    device.lender.open("kv", borrower(COUNT - 1))
    device.lender.lend("kv", COUNT)
    with pytest.raises(InsufficientMemory):
        load(device, Model("a", 1, 2, 3))
    assert device.lender.target("kv") is None
    device.lender.take_back("kv")


def test_a_borrower_shrinks_for_the_floor_of_another(device: SeparateDevice) -> None:
    lender = device.lender
    lender.open("first", borrower(2))
    lender.lend("first", COUNT)
    lender.open("second", borrower(3))
    assert lender.lend("second", 6) == ()
    assert lender.target("first") == COUNT - 3
    lender.take_back("first", range(5))
    assert len(lender.lend("second", 6)) == 3  # its floor; and now that nothing is lacking, the rest
    assert lender.target("first") is None
    assert len(lender.lend("second", 6)) == 2
    lender.take_back("first")
    lender.take_back("second")


def test_borrowers_take_turns_in_the_order_in_which_they_asked(device: SeparateDevice) -> None:
    lender = device.lender
    for name in ("first", "second", "third"):
        lender.open(name, borrower(1))
    lender.lend("first", COUNT - 2)
    lender.lend("second", 1)
    lender.lend("third", 1)
    assert lender.lend("second", 5, Turn(1, 4)) == ()
    assert (lender.has_turn("second"), lender.target("first")) == (True, COUNT - 5)
    assert lender.lend("third", 6, Turn(1, 6)) == ()
    assert not lender.has_turn("third")
    lender.take_back("first", device.store().lent["first"][:3])
    assert len(lender.lend("second", 5, Turn(1, 4))) == 3
    assert lender.target("first") is None
    assert lender.lend("second", 5, Turn(2, 4)) == ()  # another turn: behind the third
    lender.lend("third", 6, Turn(1, 6))
    assert lender.has_turn("third")
    assert lender.target("first") == COUNT - 10
    lender.close("third")
    assert lender.has_turn("second")
    for name in ("first", "second", "third"):
        lender.take_back(name)


@contextmanager
def claimed(device: SeparateDevice, page: int, *options: str) -> Iterator[None]:
    """Start a process that maps a page, and end it."""
    command = [sys.executable, "-c", CLAIM, f"/dev/shm/{device.file}", str(page), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with killed_at_exit(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"mapped\n"
        yield


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_pages_are_taken_back_only_when_no_process_maps_them(device: SeparateDevice) -> None:
    lender = device.lender
    lender.open("kv", borrower(0))
    page = lender.lend("kv", 2)[0]
    with claimed(device, page, "--lock"):
        assert lender.take_back("kv") == 1
    assert lender.take_back("kv") == 0


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_an_audit_finds_a_process_that_maps_without_a_lock_and_protects_its_pages(device: SeparateDevice) -> None:
    """An engine of an earlier version, or a foreign one."""
    lender = device.lender
    lender.open("kv", borrower(0))
    page = lender.lend("kv", 2)[0]
    with claimed(device, page):
        device.audit_mapped()
        assert lender.take_back("kv") == 1
    assert lender.take_back("kv") == 0


@pytest.mark.parametrize("device", ["gpu"], indirect=True)
def test_pages_of_a_gpu_that_were_not_returned_are_lent_until_the_process_has_exited(device: SeparateDevice) -> None:
    lender = device.lender
    with killed_at_exit(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)) as engine:
        lender.open("kv", Borrower(3, pid=engine.pid, ceiling=COUNT))
        pages = lender.lend("kv", 5)
        assert device.audit_mapped().processes == (engine.pid,)
        assert lender.take_back("kv", pages[:2]) == 3
        lender.close("kv")
        assert lender.take_back("kv") == 3
        assert device.audit_mapped().violations == ()
        lender.open("other", borrower(COUNT))
        assert not set(lender.lend("other", COUNT)) & set(pages[2:])
        engine.kill()
        engine.communicate()
    assert lender.take_back("kv") == 0
    assert len(lender.lend("other", COUNT)) == 3
    lender.take_back("other")


@pytest.mark.parametrize("device", ["gpu"], indirect=True)
def test_a_process_that_the_loader_cannot_see_gets_no_page_of_a_gpu(device: SeparateDevice) -> None:
    for pid in (None, 2**22 + 1):
        device.lender.open("kv", Borrower(1, pid=pid, ceiling=COUNT))
        with pytest.raises(EngineFailed, match="PID namespace"):
            device.lender.lend("kv", 1)
        assert device.pages().lent_bytes == 0
        device.lender.close("kv")


@pytest.mark.parametrize("device", ["gpu"], indirect=True)
def test_caches_of_a_gpu_have_no_more_than_is_booked_for_them(device: SeparateDevice) -> None:
    """All floors, and the largest growth of one: the rest may be booked for vLLM."""
    lender = device.lender
    lender.open("first", borrower(2, 6))
    lender.open("second", borrower(1, 4))
    assert len(lender.lend("first", 6)) == 6
    assert len(lender.lend("second", 4)) == 1, "3 floors and a growth of 4"
    assert lender.lend("second", 4, Turn(1, 4)) == ()
    assert lender.target("first") == 3, "the turn is below the growth that is booked"
    lender.take_back("first", device.store().lent["first"][:3])
    assert len(lender.lend("second", 4, Turn(1, 4))) == 3
    lender.close("first")
    lender.take_back("first")
    assert lender.lend("second", 6) == ()
    lender.take_back("second")


@pytest.mark.parametrize("device", ["gpu"], indirect=True)
def test_memory_of_lent_pages_is_none_of_others(device: SeparateDevice, gpus: Gpus) -> None:
    lender = device.lender
    lender.open("kv", borrower(0))
    lender.lend("kv", 4)
    device.audit_mapped()  # measures
    engine = [gpus.virtual_memory.create(0, PAGE_BYTES, exportable=False) for _ in range(4)]
    foreign = gpus.virtual_memory.create(0, 2 * PAGE_BYTES)
    device.audit_mapped()
    used = device.pages()
    assert (used.total_bytes, used.lent_bytes, used.free_bytes) == tuple(n * PAGE_BYTES for n in (COUNT - 2, 4, COUNT - 6))
    assert used.is_lending
    for allocation in (*engine, foreign):
        gpus.virtual_memory.release(allocation)
    lender.take_back("kv")
