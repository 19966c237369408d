"""Detokenizer, stop strings and the end of a response."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.engine.domain.detokenizer import Detokenizer
from services.engine.domain.generation import Generation
from services.engine.domain.sampling_params import StopConditions
from services.engine.domain.stop_strings import StopMatcher
from tests.support.examples import examples


def decode_bytes(ids: list[int]) -> str:
    """Return a tokenizer whose tokens are bytes: the worst case for characters."""
    return bytes(ids).decode("utf-8", errors="replace")


def fed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


@given(st.text(max_size=60), st.text(max_size=10))
@example("\U0001f468‍\U0001f469‍\U0001f467 né 漢字", "")
@example("\ufffd\ufffd", "é")
def test_detokenizer_splits_no_character_and_loses_none(text: str, prompt: str) -> None:
    parts = fed(Detokenizer(decode_bytes, list(prompt.encode(errors="replace"))), list(text.encode(errors="replace")))
    whole = text.encode(errors="replace").decode()
    assert "".join(parts) == whole
    if "\ufffd" not in whole:
        assert "\ufffd" not in "".join(parts)


@given(st.binary(max_size=80))
def test_invalid_bytes_decode_as_the_decoder_does(data: bytes) -> None:
    assert "".join(fed(Detokenizer(decode_bytes), list(data))) == data.decode(errors="replace")


@given(st.binary(min_size=40, max_size=200))
def test_detokenizer_holds_back_few_bytes(data: bytes) -> None:
    detokenizer, shown = Detokenizer(decode_bytes), 0
    for i, byte in enumerate(data):
        shown += len(detokenizer.feed(byte).encode())
        # A shown U+FFFD is three bytes for one or more; the test only requires that text keeps
        # arriving.
        assert i < 40 or shown > 0


def test_a_token_costs_the_same_however_long_the_text() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    fed(Detokenizer(decode), list(("words and 漢字 \U0001f600 " * 200).encode()))
    assert longest < 40


@pytest.fixture(scope="module")
def backend(demo_directory: Path) -> object:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(demo_directory / "tokenizer.json"))


@settings(max_examples=examples(200), deadline=None)
@given(ids=st.lists(st.integers(3, 1023), max_size=60), prompt=st.lists(st.integers(3, 1023), max_size=10))
def test_random_tokens_of_a_real_tokenizer(backend: object, ids: list[int], prompt: list[int]) -> None:
    def decode(tokens: list[int]) -> str:
        return str(backend.decode(tokens))  # type: ignore[attr-defined]  # tokenizers has no types

    alone = "".join(fed(Detokenizer(decode), ids))
    assert alone == decode(ids)
    # A prompt may end in half a character that the first token completes; otherwise it has no
    # effect.
    if not decode(prompt).endswith("\ufffd"):
        assert decode(prompt) + "".join(fed(Detokenizer(decode, prompt), ids)) == decode(prompt + ids)


def run_stops(stops: tuple[str, ...], parts: list[str]) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops)
    return [matcher.feed(p) for p in parts], matcher


def test_a_stop_string_across_parts_never_shows() -> None:
    shown, matcher = run_stops(("<end>",), ["ab<", "e", "nd", ">cd", "more"])
    assert (shown, matcher.matched) == (["ab", "", "", "", ""], "<end>")


def test_false_start_of_a_stop_string_is_emitted() -> None:
    shown, matcher = run_stops(("<end>",), ["ab<e", "x"])
    assert (shown, matcher.matched) == (["ab", "<ex"], None)
    shown, matcher = run_stops(("<end>",), ["ab<e"])
    assert "".join(shown) + matcher.flush() == "ab<e"


@given(st.lists(st.text("abc", min_size=1, max_size=3), max_size=3), st.lists(st.text("abc", max_size=4), max_size=12))
def test_stop_position_is_independent_of_the_split(stops: list[str], parts: list[str]) -> None:
    text = "".join(parts)
    shown, matcher = run_stops(tuple(stops), parts)
    out = "".join(shown) + matcher.flush()
    found = [text.find(s) for s in stops if s in text]
    assert text.startswith(out)
    if not found:
        assert out == text
        return
    # Fed in parts, a stop string that completes earlier wins over one that begins earlier but
    # completes later.
    assert matcher.matched is not None
    assert text[len(out) :].startswith(matcher.matched)
    assert not any(s in out for s in stops)


def answer(text: str, stop_conditions: StopConditions) -> tuple[str, str | None, int]:
    generation, shown = Generation(decode_bytes, [], stop_conditions), ""
    for byte in text.encode():
        gained = generation.feed(byte)
        shown += gained.text
        if gained.finish_reason is not None:
            return shown, gained.finish_reason, generation.count
    return shown, None, generation.count


@pytest.mark.parametrize(
    ("text", "stop_conditions", "expected"),
    [
        ("abcdef", StopConditions(3), ("abc", "length", 3)),
        ("abc.def", StopConditions(9, frozenset({ord(".")})), ("abc", "stop", 4)),
        ("abcdef", StopConditions(9, stops=("cd",)), ("ab", "stop", 4)),
        ("ab", StopConditions(2, stops=("bc",)), ("ab", "length", 2)),
        ("a€", StopConditions(3), ("a\ufffd", "length", 3)),
        ("ab.", StopConditions(9, frozenset({ord(".")}), ("bx",)), ("ab", "stop", 3)),
    ],
)
def test_finish_reason_follows_from_the_stop_conditions(
    text: str, stop_conditions: StopConditions, expected: tuple[str, str, int]
) -> None:
    assert answer(text, stop_conditions) == expected
