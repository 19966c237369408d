"""The copy-on-write mapping of a decision."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.state.overlay import Overlay

_KEYS = st.sampled_from("abcde")


@given(st.dictionaries(_KEYS, st.integers(0, 9)), st.lists(st.tuples(_KEYS, st.none() | st.integers(0, 9))))
def test_overlay_behaves_like_a_copy_and_leaves_the_original_unchanged(
    below: dict[str, int], writes: list[tuple[str, int | None]]
) -> None:
    before = dict(below)
    copy = dict(below)
    over: Overlay[int] = Overlay(below)
    for key, value in writes:
        if value is None:
            assert over.pop(key, None) == copy.pop(key, None)
        else:
            over[key] = copy[key] = value
        assert dict(over) == dict(over.items()) == copy
        assert sorted(over.values()) == sorted(copy.values())
        assert (len(over), bool(over)) == (len(copy), bool(copy))
        assert all((k in over, over.get(k)) == (k in copy, copy.get(k)) for k in "abcde")
    assert below == before
