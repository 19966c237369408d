"""ReplayFilter removes exactly the forwarded output, however it is split."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.requests.replay_filter import ReplayFilter
from services.gateway.requests.sink import Diverged

TEXT = "Where does the ice go?"


def deltas(text: str, cuts: list[int], index: int = 0) -> list[dict[str, Any]]:
    """Return deltas of one token for each character; the last one ends the response."""
    found, rest = [], text
    for cut in [*cuts, len(text)]:
        piece, rest = rest[:cut], rest[cut:]
        if piece:
            found.append({"index": index, "text": piece, "token_ids": [ord(c) for c in piece]})
    found[-1]["finish_reason"] = "stop"
    return found


def summary(pieces: list[dict[str, Any]]) -> tuple[str, list[int], int]:
    text = "".join(p["text"] for p in pieces)
    return text, [t for p in pieces for t in p["token_ids"]], sum(bool(p.get("finish_reason")) for p in pieces)


@given(st.integers(0, len(TEXT)), st.lists(st.integers(1, 6), max_size=9), st.lists(st.integers(1, 6), max_size=9))
def test_new_output_passes_exactly_once(known: int, before: list[int], after: list[int]) -> None:
    first = deltas(TEXT[:known], before)[:] if known else []
    for piece in first:
        piece.pop("finish_reason", None)
    forwarded = [{"kind": "chunk", "choices": [p]} for p in first]
    replay_filter = ReplayFilter(forwarded)
    got = [rest for piece in deltas(TEXT, after) for rest in replay_filter.remove_from([piece])]
    text, tokens, ends = summary(got)
    assert (text, tokens, ends) == (TEXT[known:], [ord(c) for c in TEXT[known:]], 1)
    assert not replay_filter


def test_forwarded_finish_is_not_forwarded_again() -> None:
    replay_filter = ReplayFilter([{"choices": deltas("ab", [1])}])
    assert replay_filter.get_pending(0) == (2, 2, True)
    assert [replay_filter.remove_from([p]) for p in deltas("ab", [1])] == [[], []]
    assert not replay_filter


def test_choices_are_filtered_independently() -> None:
    replay_filter = ReplayFilter([{"choices": deltas("ab", [])}])
    assert replay_filter.remove_from(deltas("cd", [], index=1)) == deltas("cd", [], index=1)
    assert replay_filter


def test_different_tokens_are_refused() -> None:
    replay_filter = ReplayFilter([{"choices": [{"text": "ab", "token_ids": [97, 98]}]}])
    with pytest.raises(Diverged):
        replay_filter.remove_from([{"text": "ac", "token_ids": [97, 99]}])


def test_a_second_rewind_precedes_pending_output() -> None:
    replay_filter = ReplayFilter([{"choices": [{"text": "abcd", "token_ids": [1, 2, 3, 4]}]}])
    replay_filter.remove_from([{"text": "ab", "token_ids": [1, 2]}])
    both = replay_filter.preceded_by([{"choices": [{"text": "b", "token_ids": [2]}]}])
    assert both.get_pending(0) == (3, 3, False)
    assert both.remove_from([{"text": "bcde", "token_ids": [2, 3, 4, 5]}]) == [{"text": "e", "token_ids": [5]}]


def test_progress_is_covered_in_full_or_not_at_all() -> None:
    replay_filter = ReplayFilter([{"progress": [{"text": "ab", "token_ids": [1, 2]}]}])
    assert replay_filter.covers([{"text": "a", "token_ids": [1]}])
    with pytest.raises(Diverged):
        replay_filter.covers([{"text": "bc", "token_ids": [2, 3]}])
    assert not ReplayFilter().covers([{"text": "c", "token_ids": [3]}])
