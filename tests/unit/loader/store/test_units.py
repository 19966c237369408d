"""Units tile the tensors of a segment; equal content has equal keys."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.segment import SegmentTensor
from weights.store.units import PAGE_BYTES, Unit, address_range, cut_units

SIZES = st.lists(st.sampled_from((0, 256, 4096, PAGE_BYTES // 3, PAGE_BYTES - 256, PAGE_BYTES, 5 * PAGE_BYTES // 2)), max_size=30)


def tensors(*sizes: int, start: int = 4096, gap: int = 0) -> list[SegmentTensor]:
    found, at = [], start
    for n, size in enumerate(sizes):
        found.append(SegmentTensor(name=f"t{n}", dtype="U8", shape=(size,), offset=at, nbytes=size))
        at += size + gap
    return found


def digests(names: list[SegmentTensor], content: str = "") -> dict[str, str]:
    return {t.name: hashlib.sha256(f"{content}{t.name}".encode()).hexdigest() for t in names}


@given(SIZES)
def test_every_tensor_is_in_one_unit_and_small_ones_are_grouped(sizes: list[int]) -> None:
    segment = tensors(*sizes, gap=256)
    units = cut_units(segment, digests(segment), "w")
    for tensor in [t for t in segment if t.nbytes]:
        holding = [u for u in units if u.offset <= tensor.offset and tensor.offset + tensor.nbytes <= u.end]
        assert len(holding) == 1
    mapped = address_range(units)
    assert mapped.nbytes == sum(u.pages for u in units) * PAGE_BYTES
    places = [(mapped.place(t), t.nbytes) for t in segment if t.nbytes]
    assert all(a + n <= b for (a, n), (b, _) in pairwise(places))
    small = [u for u in units if u.nbytes < PAGE_BYTES]
    large = [t for t in segment if t.nbytes >= PAGE_BYTES]
    assert len(small) <= len(large) + 1, "neighbours are grouped until they reach a page"


def test_equal_content_at_other_offsets_has_the_same_keys() -> None:
    one, other = tensors(PAGE_BYTES, 100, 200), tensors(PAGE_BYTES, 100, 200, start=81920)
    names = digests(one)
    assert [u.key for u in cut_units(one, names, "a")] == [u.key for u in cut_units(other, names, "b")]


def test_changed_tensor_changes_only_the_key_of_its_unit() -> None:
    segment = tensors(PAGE_BYTES, PAGE_BYTES, 100, 200)
    before = cut_units(segment, digests(segment), "w")
    after = cut_units(segment, digests(segment) | {"t3": "0" * 64}, "w")
    assert [a.key == b.key for a, b in zip(before, after, strict=True)] == [True, True, False]


def test_another_order_of_equal_tensors_is_other_content() -> None:
    segment = tensors(100, 200)
    swapped = tensors(200, 100)
    one = cut_units(segment, {"t0": "a" * 64, "t1": "b" * 64}, "w")
    other = cut_units(swapped, {"t0": "b" * 64, "t1": "a" * 64}, "w")
    assert one[0].key != other[0].key


def test_a_unit_with_an_unknown_hash_is_shared_with_no_other_weights() -> None:
    segment = tensors(PAGE_BYTES, PAGE_BYTES)
    known = {"t0": "a" * 64}
    one, other = cut_units(segment, known, "one"), cut_units(segment, known, "other")
    assert one[0].key == other[0].key
    assert one[1].key != other[1].key
    assert cut_units(segment, known, "one") == one


def test_tied_tensors_share_a_unit() -> None:
    embedding, head = (SegmentTensor(name=n, dtype="U8", shape=(PAGE_BYTES,), offset=4096, nbytes=PAGE_BYTES) for n in ("e", "h"))
    (unit,) = cut_units([embedding, head], {"e": "a" * 64, "h": "a" * 64}, "w")
    assert (unit.offset, unit.nbytes) == (4096, PAGE_BYTES)


def test_overlapping_units_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        address_range([Unit("a", 0, 100), Unit("b", 50, 100)])
