"""The stored responses of an API key stay within their bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.domain.stored_responses import (
    ResponseIndex,
    StorageBounds,
    StoredResponse,
    add_response,
    remove_response,
)

BOUNDS = StorageBounds(count=3, size_bytes=100, age_s=50)


def response(name: str, size_bytes: int = 10, stored_at: float = 0) -> StoredResponse:
    return StoredResponse(id=name, size_bytes=size_bytes, stored_at=stored_at)


def add(*responses: StoredResponse) -> tuple[list[str], list[str]]:
    """Add responses; return the ids that stay and those that were removed, in their order."""
    index = ResponseIndex()
    removed: list[str] = []
    for new in responses:
        index, names = add_response(index, new, BOUNDS)
        removed += names
    return [found.id for found in index.responses], removed


def test_oldest_is_removed_beyond_the_count() -> None:
    assert add(*map(response, "abcd")) == (["b", "c", "d"], ["a"])


def test_oldest_are_removed_beyond_the_bytes() -> None:
    assert add(response("a", 50), response("b", 50), response("c", 60)) == (["c"], ["a", "b"])


def test_response_that_is_too_large_by_itself_is_removed() -> None:
    assert add(response("a"), response("b", 101)) == ([], ["a", "b"])


def test_expired_responses_are_removed() -> None:
    assert add(response("a", stored_at=0), response("b", stored_at=40), response("c", stored_at=51)) == (["b", "c"], ["a"])


def test_repeated_response_replaces_its_entry() -> None:
    assert add(response("a", 90), response("b"), response("a", 20)) == (["b", "a"], [])


def test_removed_response_makes_room() -> None:
    index = ResponseIndex(responses=tuple(map(response, "abc")))
    index, removed = add_response(remove_response(index, "b"), response("d"), BOUNDS)
    assert ([found.id for found in index.responses], removed) == (["a", "c", "d"], ())


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 120), st.floats(0, 100)), max_size=20))
def test_bounds_hold_and_each_response_is_kept_or_removed(given: list[tuple[str, int, float]]) -> None:
    index = ResponseIndex()
    for name, size_bytes, stored_at in given:
        before = {found.id for found in index.responses} | {name}
        index, removed = add_response(index, response(name, size_bytes, stored_at), BOUNDS)
        kept = [found.id for found in index.responses]
        assert len(kept) <= BOUNDS.count
        assert sum(found.size_bytes for found in index.responses) <= BOUNDS.size_bytes
        assert sorted([*kept, *removed]) == sorted(before)
