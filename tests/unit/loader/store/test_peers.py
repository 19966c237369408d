"""Units that lie on another device of the node are copied from there.

On cpu, and on GPUs by the stand-in driver.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.loader.store.gpu import Gpu, Gpus
from tests.unit.loader.store.peer_nodes import CpuNode, GpuNode, Node
from tests.unit.loader.store.separate_devices import GPUS, PREFIX, TENSOR, Model, check, fill, load, pages_of
from weights.store import checking, copying, peers
from weights.store import missing as missing_units
from weights.store.cost import SECONDS_PER_GB
from weights.store.generations import file_name
from weights.store.missing import Missing
from weights.store.node_devices import NodeDevices
from weights.store.peers import split
from weights.store.residency import KnownUnits
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

SLOW = 1.0
"""Bytes per second of a link that never finishes a unit in a test."""


@pytest.fixture(params=[CpuNode, GpuNode], ids=["cpu", "gpu"])
def make(request: pytest.FixtureRequest) -> type[CpuNode] | type[GpuNode]:
    found: type[CpuNode] | type[GpuNode] = request.param
    return found


@pytest.fixture
def node(make: type[CpuNode] | type[GpuNode]) -> Iterator[Node]:
    node = make(verify=True)
    yield node
    node.close()


def test_each_link_takes_what_it_finishes_sooner() -> None:
    def from_host(peer_rate: float, host_rate: float, host_bytes: int = 0) -> int:
        return len(split([(i, 100, peer_rate) for i in range(6)], host_rate, host_bytes))

    assert from_host(100.0, 1e-3) == 0
    assert from_host(100.0, 100.0) == 3
    assert from_host(1e-3, 100.0) == 6
    assert from_host(100.0, 100.0, host_bytes=400) == 1, "host memory has other units to bring"


def test_units_of_another_device_need_no_bytes_in_host_memory(node: Node) -> None:
    model = Model("m", 1, 2, 3)
    first = load(node.one, model)
    second = node.two.allocate(model.place())
    assert second.wait(model.nbytes)
    check(first, model)
    assert second.handle() is not None
    used = node.two.pages()
    assert (used.copied_bytes, used.peer_bytes) == (3 * TENSOR, 3 * TENSOR)
    assert ([link.copied_bytes for link in node.two.peer_links], node.two.copied_bytes) == ([3 * TENSOR], 0)
    first.release()
    assert node.becomes_reusable(3), "nothing is held there after the copy"


def test_only_units_that_no_device_has_are_read(node: Node) -> None:
    load(node.one, Model("base", 1, 2, 3))
    tuned = Model("tuned", 1, 2, 4)
    arena = node.two.allocate(tuned.place())
    assert [end - start for start, end in arena.find_missing()] == [TENSOR]
    [(start, end)] = arena.find_missing()
    arena.fill(start, tuned.address + start, end - start)
    assert arena.wait(tuned.nbytes)
    assert (node.two.pages().peer_bytes, arena.copied_bytes) == (2 * TENSOR, 3 * TENSOR)


def test_units_being_copied_are_not_reclaimed_there(make: type[CpuNode] | type[GpuNode]) -> None:
    node, model = make(peer=SLOW), Model("m", 1, 2, 3)
    load(node.one, model).release()
    arena = node.two.allocate(model.place())
    assert pages_of(node.one.pages()) == (5, 3, 0, 0), "held for the copy"
    arena.release()
    assert pages_of(node.one.pages()) == (5, 0, 3, 0)
    node.close()


def test_host_memory_takes_what_a_slow_device_has_not_copied(make: type[CpuNode] | type[GpuNode]) -> None:
    node, model = make(peer=SLOW), Model("m", 1, 2, 3)
    load(node.one, model)
    arena = node.two.allocate(model.place())
    arena.fill(0, model.address, model.nbytes)
    with node.two.changed:
        assert node.two.changed.wait_for(lambda: len(arena.missing) <= 1, 30.0), "all but the one under way"
    arena.release()
    node.close()


def test_units_are_not_held_there_after_host_memory_copied_the_last_one(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    model, has_begun, may_end = Model("m", 1, 2), threading.Event(), threading.Event()

    def key_on_device(*arguments: Any) -> str:  # of the thread that copies from the other device
        assert has_begun.wait(30.0)
        return checking.key_on_device(*arguments)

    def digests_of(missing: Missing) -> dict[str, str]:  # of the thread that copies from host memory
        has_begun.set()
        assert may_end.wait(30.0)
        return missing_units.digests_of(missing)

    load(node.one, model).release()
    monkeypatch.setattr(peers, "key_on_device", key_on_device)
    monkeypatch.setattr(copying, "digests_of", digests_of)
    arena = node.two.allocate(model.place())
    arena.fill(0, model.address, model.nbytes)
    with node.two.changed:
        assert node.two.changed.wait_for(lambda: len(arena.missing) == 1, 30.0)
    assert pages_of(node.one.pages()) == (6, 2, 0, 0), "held for the copy"
    may_end.set()
    assert arena.wait(model.nbytes)
    assert (arena.peer_bytes, arena.copied_bytes) == (TENSOR, 2 * TENSOR)
    assert node.becomes_reusable(2)


def test_a_damaged_unit_of_another_device_is_taken_from_host_memory(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("m", 1, 2)
    load(node.one, model)
    monkeypatch.setattr(peers, "key_on_device", lambda *_: "sha256:other")
    arena = node.two.allocate(model.place())
    with node.two.changed:
        assert node.two.changed.wait_for(lambda: all(m.peer is None for m in arena.missing.values()), 30.0)
    assert len(arena.find_missing()) == 2
    fill(arena, model)
    assert node.two.pages().peer_bytes == 0
    assert (node.one.pages().changed_units, node.two.pages().changed_units) == (0, 2)
    assert arena.copied_bytes == 2 * TENSOR


def test_a_device_that_closes_midway_is_no_source_any_more(make: type[CpuNode] | type[GpuNode]) -> None:
    node, model = make(peer=40 * TENSOR), Model("m", 1, 2, 3)
    load(node.one, model)
    arena = node.two.allocate(model.place())
    node.one.close()
    fill(arena, model)
    assert arena.copied_bytes == 3 * TENSOR
    arena.release()
    assert pages_of(node.two.pages()) == (5, 0, 3, 0)
    node.close()


@pytest.mark.parametrize("has_links", [True, False], ids=["linked", "by way of the host"])
def test_gpus_copy_over_their_link_where_they_have_one(has_links: bool) -> None:
    node, model = GpuNode(verify=True), Model("m", 1, 2, 3)
    node.gpus.virtual_memory.has_links = has_links
    load(node.one, model)
    arena = node.two.allocate(model.place())
    assert arena.wait(model.nbytes)
    check(arena, model)
    assert node.gpus.driver.peer_copies == [(0, 1, TENSOR, has_links)] * 3
    assert node.gpus.driver.copies != [], "the first device got its units from host memory"
    node.close()


def test_units_that_were_held_for_a_copy_are_freed_beyond_the_limit_afterwards() -> None:
    node, model = GpuNode(peer=SLOW, reuse_pages=1), Model("m", 1, 2, 3)
    first = load(node.one, model)
    arena = node.two.allocate(model.place())
    first.release()
    assert pages_of(node.one.pages()) == (5, 3, 0, 0), "held for the copy"
    arena.release()
    assert pages_of(node.one.pages()) == (7, 0, 1, 0)
    assert node.gpus.virtual_memory.free_bytes(0) == 7 * PAGE_BYTES
    node.close()


@pytest.mark.parametrize("fault", ["fail_copy", "fail_event"])
def test_units_that_a_gpu_fails_to_copy_from_another_are_taken_from_host_memory(fault: str) -> None:
    node, model = GpuNode(), Model("m", 1, 2)
    load(node.one, model)
    setattr(node.gpus.driver, fault, True)
    arena = node.two.allocate(model.place())
    with node.two.changed:
        assert node.two.changed.wait_for(lambda: len(arena.missing) == 1 and not arena.under_way, 30.0)
    [(start, end)] = arena.find_missing()
    arena.fill(start, model.address + start, end - start)
    assert arena.wait(model.nbytes)
    check(arena, model)
    assert (node.two.pages().peer_bytes, node.two.pages().copied_bytes) == (TENSOR, 2 * TENSOR)
    node.close()


def test_a_gpu_copies_from_a_cpu_device_and_back() -> None:
    known = KnownUnits()
    gpus, cpu = Gpus(8, known=known), SeparateDevice("cpu:1", 8 * PAGE_BYTES, file_name(PREFIX, "cpu:1", "boot"), known=known)
    devices = NodeDevices({"cpu:1": cpu}, gpus.devices, known)
    gpu = devices.get("cuda:0")
    assert isinstance(gpu, SeparateDevice)
    GPUS[gpu] = Gpu(machine=gpus)
    one, two = Model("one", 1, 2), Model("two", 3, 4)
    load(cpu, one)
    load(gpu, two)
    for device, model in ((gpu, one), (cpu, two)):
        arena = device.allocate(model.place())
        assert arena.wait(model.nbytes)
        check(arena, model)
        assert device.pages().peer_bytes == 2 * TENSOR
    devices.close()
    gpus.close()
    del GPUS[gpu]


def test_a_gpu_that_is_not_open_yet_lacks_all_that_others_have() -> None:
    known = KnownUnits()
    gpus = Gpus(8, 2, known=known)
    devices, model = NodeDevices({}, gpus.devices, known), Model("m", 1, 2, 3)
    contents = model.place().contents
    assert contents is not None
    assert devices.count_missing("m", contents) == {}
    first = devices.get("cuda:0")
    assert isinstance(first, SeparateDevice)
    assert devices.count_missing("m", contents) == {}
    load(first, model).release()
    assert devices.count_missing("m", contents) == {"cuda:0": 0, "cuda:1": 3 * TENSOR}
    devices.expect({"m": 0.5})
    second = devices.get("cuda:1")
    assert isinstance(second, SeparateDevice)
    assert second.store().units == {}
    arena = second.allocate(model.place())
    assert arena.wait(model.nbytes)
    assert {second.cost()(u) / first.cost()(u) for u in second.store().units.values()} == {1.0}, "priced alike"
    assert second.cost()(next(iter(second.store().units.values()))) == TENSOR / 1e9 * SECONDS_PER_GB["ssd"] * 0.5
    assert (second.pages().peer_bytes, [w.missing_bytes for w in first.pages().weights]) == (3 * TENSOR, [0])
    devices.close()
    gpus.close()


def test_units_are_reported_in_groups_although_another_device_was_sooner(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit whose bytes arrive in host memory meanwhile is not waited for."""
    model = Model("m", 1, 2)
    is_checked, may_be_checked, has_begun, may_end = (threading.Event() for _ in range(4))

    def key_on_device(*arguments: Any) -> str:  # of the thread that copies from the other device
        is_checked.set()
        assert may_be_checked.wait(30.0)
        return checking.key_on_device(*arguments)

    def digests_of(missing: Missing) -> dict[str, str]:  # of the thread that copies from host memory
        has_begun.set()
        assert may_end.wait(30.0)
        return missing_units.digests_of(missing)

    load(node.one, model)
    monkeypatch.setattr(peers, "key_on_device", key_on_device)
    monkeypatch.setattr(copying, "digests_of", digests_of)
    arena = node.two.allocate(model.place())
    arena.group_bytes = 8 * PAGE_BYTES
    assert is_checked.wait(30.0)
    first, second = arena.units
    arena.fill(second.offset, model.address + second.offset, second.nbytes)
    assert has_begun.wait(30.0)
    arena.fill(first.offset, model.address + first.offset, first.nbytes)
    may_be_checked.set()
    with node.two.changed:
        assert node.two.changed.wait_for(lambda: len(arena.missing) == 1, 30.0)
    may_end.set()
    assert arena.wait(model.nbytes)
    found: list[int] = []
    while units := arena.wait_units(len(found)):
        found += [u.unit for u in units]
    assert found == [0, 1]
