"""Units in real shared memory.

An engine's mapping shows the right bytes, whatever was loaded and reclaimed before.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator

import pytest

from shared.contracts.segment import Extent
from shared.mapping import map_descriptor
from tests.unit.loader.pools import mapper
from weights.pool import memory as pool_memory
from weights.pool.memory import read_mappings
from weights.pool.shm import SHM
from weights.store.memory import PageMemory, extents_of
from weights.store.pages import Store, audit, complete, lend, release, reserve
from weights.store.units import PAGE_BYTES, Unit, address_range

PAGES = 10
NAME = f"thaw-test-pages-{os.getpid()}"


@pytest.fixture
def memory() -> Iterator[PageMemory]:
    memory = PageMemory(NAME, PAGES)
    yield memory
    memory.close(unlink=True)
    assert not (SHM / NAME).exists()


def content(unit: Unit) -> bytes:
    return random.Random(unit.key).randbytes(unit.nbytes)


def copy(memory: PageMemory, store: Store, unit: Unit) -> None:
    """Copy a unit in pieces that cross its pages, out of order."""
    data = ctypes.create_string_buffer(content(unit), unit.nbytes)
    cuts = list(range(0, unit.nbytes, 700_001))
    for start in reversed(cuts):
        memory.write(store.units[unit.key], start, ctypes.addressof(data) + start, min(700_001, unit.nbytes - start))


def seen(memory: PageMemory, store: Store, units: list[Unit]) -> list[bytes]:
    """Return what an engine reads of each unit through its mapping."""
    places = address_range(units)
    mapped = map_descriptor(memory.fd, extents_of([store.units[u.key] for u in units]))
    try:
        assert len(mapped) == places.nbytes
        return [mapped[start : start + u.nbytes] for u, start in zip(units, places.starts, strict=True)]
    finally:
        mapped.close()


def segment(*keys_and_pages: tuple[str, int]) -> list[Unit]:
    units, at = [], 0
    for key, pages in keys_and_pages:
        units.append(Unit(key, at, pages * PAGE_BYTES - 12_345))
        at += pages * PAGE_BYTES
    return units


def test_random_loads_and_reclaims_never_serve_wrong_bytes(memory: PageMemory) -> None:
    models = {
        "base": segment(("b0", 3), ("b1", 2), ("b2", 1)),
        "tuned": segment(("b0", 3), ("b1", 2), ("t2", 1)),
        "other": segment(("o0", 4), ("o1", 2)),
        "small": segment(("s0", 1), ("b2", 1)),
    }
    random_choice = random.Random(5)
    store, held, copied = Store.empty(PAGES), dict[str, str](), 0
    for number in range(60):
        if held and random_choice.random() < 0.45:
            holder = random_choice.choice(sorted(held))
            del held[holder]
            store, _ = release(store, holder, float(number))
        else:
            model, holder = random_choice.choice(sorted(models)), f"i{number}"
            found = reserve(store, holder, model, models[model], float(number), lambda u: u.used_at)
            if found is None:
                continue
            store, held[holder] = found.store, model
            for unit in found.missing:
                copy(memory, store, unit)
                copied += 1
            store = complete(store, [u.key for u in found.missing])
        assert audit(store) == []
        for model in set(held.values()):
            assert seen(memory, store, models[model]) == [content(u) for u in models[model]]
    assert 10 < copied < 60, "some units were copied, and others were reused"


def test_scattered_pages_are_one_range_for_an_engine(memory: PageMemory) -> None:
    store = Store.empty(PAGES)
    for n in range(0, PAGES, 2):
        found = reserve(
            store, f"even{n}", "m", [Unit(f"even{n}", 0, PAGE_BYTES), Unit(f"odd{n}", PAGE_BYTES, PAGE_BYTES)], 0, len_of
        )
        assert found is not None
        store = complete(found.store, [f"even{n}", f"odd{n}"])
    for n in range(0, PAGES, 2):
        store, _ = release(store, f"even{n}", 1.0)
    big = Unit("big", 0, PAGES // 2 * PAGE_BYTES)
    found = reserve(store, "b", "other", [big], 2.0, lambda u: float(u.key.startswith("even")))
    assert found is not None
    assert all(key.startswith("odd") for key in found.reclaimed)
    copy(memory, found.store, big)
    assert len(extents_of([found.store.units["big"]])) == PAGES // 2, "no two of its pages are neighbours"
    assert seen(memory, found.store, [big]) == [content(big)]


def len_of(_: object) -> float:
    return 0.0


def test_memory_is_allocated_at_the_first_copy_and_freed(memory: PageMemory) -> None:
    found = reserve(Store.empty(PAGES), "a", "m", [Unit("u", 0, 3 * PAGE_BYTES)], 0.0, len_of)
    assert found is not None
    assert memory.allocated_bytes() == 0
    copy(memory, found.store, Unit("u", 0, 3 * PAGE_BYTES))
    assert memory.allocated_bytes() == 3 * PAGE_BYTES
    assert memory.free(found.store.units["u"].pages) == 3 * PAGE_BYTES
    assert memory.allocated_bytes() == 0


def test_the_mapping_process_of_each_page_is_found(memory: PageMemory) -> None:
    found = reserve(Store.empty(PAGES), "a", "m", segment(("u", 2), ("v", 1)), 0.0, len_of)
    assert found is not None
    lent = lend(found.store, "kv", 1, len_of)
    assert lent is not None
    stored = found.store.units["v"]
    with mapper(SHM / NAME, extents_of([stored])) as process:
        assert memory.mapped_by_others() == {page: [process.pid] for page in stored.pages}


def test_one_reading_of_the_mappings_serves_several_memories(memory: PageMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    other = PageMemory(f"{NAME}-2", PAGES)
    try:
        first, second = Extent(offset=PAGE_BYTES, nbytes=PAGE_BYTES), Extent(offset=3 * PAGE_BYTES, nbytes=2 * PAGE_BYTES)
        with mapper(SHM / NAME, [first]) as one, mapper(SHM / f"{NAME}-2", [second]) as two:
            mappings = read_mappings()
            monkeypatch.setattr(pool_memory, "read_mappings", lambda: pytest.fail("read again"))
            assert memory.mapped_by_others(mappings) == {1: [one.pid]}
            assert other.mapped_by_others(mappings) == {3: [two.pid], 4: [two.pid]}
    finally:
        other.close(unlink=True)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, 0), (PAGE_BYTES - 1, 2)])
def test_a_copy_beyond_a_unit_is_refused(memory: PageMemory, offset: int, nbytes: int) -> None:
    found = reserve(Store.empty(PAGES), "a", "m", [Unit("u", 0, PAGE_BYTES)], 0.0, len_of)
    assert found is not None
    with pytest.raises(ValueError, match="are outside a unit"):
        memory.write(found.store.units["u"], offset, 0, nbytes)
