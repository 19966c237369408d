"""Units of unknown content get pages once they are hashed and are not on the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shared.errors import InsufficientMemory
from tests.unit.loader.store.separate_devices import HEAD, TENSOR, Model, check, fill, load, made, pages_of
from weights.store import device_pages
from weights.store.arena import PagedArena
from weights.store.lending import Borrower
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

BASE = Model("base", *range(10))
TUNED = Model("tuned", *range(8), 20, 21)
"""80 % of its bytes are those of the base."""


@pytest.fixture
def device() -> Iterator[SeparateDevice]:
    device = made(pages=12)
    yield device
    assert device.audit() == []
    device.close()


def fill_unit(device: SeparateDevice, arena: PagedArena, model: Model, index: int) -> None:
    """Fill one unit, and wait until it is on the device."""
    start = HEAD + index * TENSOR
    arena.fill(start, model.address + start, TENSOR)
    with device.changed:
        assert device.changed.wait_for(lambda: index not in arena.missing, 30.0)


def test_a_fine_tune_needs_room_for_its_own_part_only(device: SeparateDevice) -> None:
    base = load(device, BASE, hashed=False)
    assert pages_of(device.pages()) == (2, 10, 0, 0)
    tuned = load(device, TUNED, hashed=False)
    assert pages_of(device.pages()) == (0, 12, 0, 0)
    check(tuned, TUNED)
    check(base, BASE)


@pytest.mark.parametrize("ahead", [0, 3])
def test_no_more_than_a_few_pages_are_reserved_ahead(device: SeparateDevice, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_pages, "AHEAD_BYTES", ahead * PAGE_BYTES)
    arena = device.allocate(BASE.place(hashed=False))
    assert pages_of(device.pages()) == (12, 0, 0, 0), "nothing is hashed yet"
    assert device.pages().weights == (), "an instance that loads it is charged in full"
    fill_unit(device, arena, BASE, 0)
    assert pages_of(device.pages()) == (11 - ahead, 1 + ahead, 0, 0)
    [known] = device.pages().weights
    assert known.unmapped_bytes == (9 - ahead) * PAGE_BYTES, "the rest has no pages yet, and counts for the charge"
    for index in range(1, 10):
        fill_unit(device, arena, BASE, index)
    arena.release()
    assert pages_of(device.pages()) == (2, 0, 10, 0)


def test_a_load_that_lacks_pages_midway_frees_all_that_it_reserved(device: SeparateDevice) -> None:
    base = load(device, BASE, hashed=False)
    other = Model("other", 0, 1, 2, 30, 31, 32)
    arena = device.allocate(other.place(hashed=False))
    with pytest.raises(InsufficientMemory, match="need 2 MiB more of cpu:1, of which 0 MiB can be given"):
        fill(arena, other)
    arena.release()
    assert device.pages().mapped_bytes == 10 * PAGE_BYTES
    check(base, BASE)


def test_a_load_that_cannot_fit_whatever_it_shares_is_refused_before_it_is_read(device: SeparateDevice) -> None:
    load(device, BASE, hashed=False)
    with pytest.raises(InsufficientMemory):
        device.allocate(Model("large", *range(40, 53)).place(hashed=False))
    assert pages_of(device.pages()) == (2, 10, 0, 0)


def test_a_load_that_is_released_while_it_waits_for_pages_lacks_none_any_more(device: SeparateDevice) -> None:
    lender, asked = device.lender, threading.Event()
    arena = device.allocate(BASE.place(hashed=False))
    lender.open("kv", Borrower(floor=2))
    assert len(lender.lend("kv", 12)) == 12
    lender.on_change = asked.set
    arena.fill(HEAD, BASE.address + HEAD, TENSOR)
    assert asked.wait(30)
    assert lender.target("kv") is not None
    arena.release()
    assert lender.target("kv") is None, "nothing needs the cache's pages"
    assert lender.take_back("kv") == 0
    assert len(lender.lend("kv", 12)) == 12, "the cache grows beyond its floor again"
    lender.take_back("kv")
