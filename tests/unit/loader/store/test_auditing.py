"""The audit of a device: records, arenas, and the pages that processes map."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.loader.store.audit_snapshots import snapshot
from weights.store.auditing import audit_mappings, audit_records, confirm
from weights.store.pages import Store


def test_a_correct_device_has_no_violation() -> None:
    device = snapshot()
    found = audit_mappings(device, {1: [70]}, device)
    assert (found.violations, found.held_back_pages, found.processes) == ((), 0, (70,))


def test_units_of_arenas_that_are_not_open_are_found() -> None:
    device = snapshot()
    assert audit_records(replace(device, open_arenas=frozenset())) == ["unit used has holder arena-2, which is not open"]
    assert audit_records(replace(device, open_arenas=frozenset(), opening=frozenset({"arena-2"}))) == []


def test_pages_lent_to_an_unknown_borrower_are_found() -> None:
    device = snapshot()
    store = replace(device.store, lent={"kv": (3,)}, free=(2,))
    assert audit_records(replace(device, store=store)) == []
    assert audit_records(replace(device, store=store, lent_to={"kv": None})) == []
    assert audit_records(replace(device, store=store, lent_to={})) == ["1 pages are lent to kv, which is unknown"]


def test_free_pages_that_a_process_maps_are_found_and_reusable_ones_counted() -> None:
    device = snapshot()
    found = audit_mappings(device, {0: [71], 2: [72, 71]}, device)
    assert found.violations == ("page 2 is free, and processes 71, 72 map it",)
    assert (found.held_back_pages, found.processes) == (1, (71, 72))


def test_lent_pages_that_another_process_maps_are_found_and_unclaimed_ones_counted() -> None:
    device = snapshot()
    device = replace(device, store=replace(device.store, lent={"kv": (2, 3)}, free=()), lent_to={"kv": 70})
    assert audit_mappings(device, {2: [70], 3: [70]}, device).violations == ()
    found = audit_mappings(device, {2: [70, 71]}, device)
    assert found.violations == ("page 2 is lent to kv of process 70, and processes 71 map it",)
    assert found.unclaimed_pages == 1
    returned = replace(device, store=replace(device.store, lent={"kv": (3,)}, free=(2,)))
    assert audit_mappings(device, {2: [71]}, returned).violations == ()


def test_a_page_that_was_given_out_during_the_audit_is_no_violation() -> None:
    after = snapshot()
    before = replace(after, store=Store.empty(4), open_arenas=frozenset())
    assert audit_mappings(before, {1: [70]}, after).violations == ()


def test_only_repeated_violations_count() -> None:
    device = snapshot()
    first, second = (audit_mappings(device, {page: [70], 3: [70]}, device) for page in (2, 1))
    assert confirm(first, second).violations == ("page 3 is free, and processes 70 map it",)
