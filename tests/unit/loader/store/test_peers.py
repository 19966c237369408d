"""Units that lie on another device of the node are copied from there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.loader.store.test_separate import PREFIX, TENSOR, Model, check, fill, load, pages_of
from weights.devices.pacing import Pacer
from weights.store import checking, copying, peers
from weights.store import missing as missing_units
from weights.store.generations import file_name
from weights.store.missing import Missing
from weights.store.node_devices import NodeDevices
from weights.store.peers import split
from weights.store.residency import KnownUnits
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

PAIR = frozenset(("cpu:1", "cpu:2"))
SLOW = 1.0
"""Bytes per second of a link that never finishes a unit in a test."""


class Node:
    """Two devices that share what they know. `host`: pace from host memory to the second one."""

    def __init__(self, *, host: float | None = None, peer: float | None = None, verify: bool = False) -> None:
        known = KnownUnits()
        names = [file_name(PREFIX, d, "boot") for d in ("cpu:1", "cpu:2")]
        self.one = SeparateDevice("cpu:1", 8 * PAGE_BYTES, names[0], known=known)
        self.two = SeparateDevice("cpu:2", 8 * PAGE_BYTES, names[1], known=known, host_bytes_per_second=host, verify=verify)
        pacers = {PAIR: Pacer(peer)} if peer is not None else {}
        self.devices = NodeDevices({"cpu:1": self.one, "cpu:2": self.two}, known=known, pacers=pacers)

    def becomes_reusable(self, count: int) -> bool:
        """Wait until this number of units on the first device have no holder."""

        def are_reusable() -> bool:
            return sum(u.is_reusable for u in self.one.store().units.values()) == count

        with self.one.changed:
            return self.one.changed.wait_for(are_reusable, 30.0)

    def close(self) -> None:
        for device in (self.one, self.two):
            assert device.audit() == []
        self.devices.close()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(verify=True)
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


def test_units_being_copied_are_not_reclaimed_there() -> None:
    node, model = Node(peer=SLOW), Model("m", 1, 2, 3)
    load(node.one, model).release()
    arena = node.two.allocate(model.place())
    assert pages_of(node.one.pages()) == (5, 3, 0, 0), "held for the copy"
    arena.release()
    assert pages_of(node.one.pages()) == (5, 0, 3, 0)
    node.close()


def test_host_memory_takes_what_a_slow_device_has_not_copied() -> None:
    node, model = Node(peer=SLOW), Model("m", 1, 2, 3)
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


def test_a_device_that_closes_midway_is_no_source_any_more() -> None:
    node, model = Node(peer=40 * TENSOR), Model("m", 1, 2, 3)
    load(node.one, model)
    arena = node.two.allocate(model.place())
    node.one.close()
    fill(arena, model)
    assert arena.copied_bytes == 3 * TENSOR
    arena.release()
    assert pages_of(node.two.pages()) == (5, 0, 3, 0)
    node.close()
