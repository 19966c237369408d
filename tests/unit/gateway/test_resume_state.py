"""The tokens from which the next engine continues a response."""

from __future__ import annotations

from typing import Any

from services.gateway.requests.resume_state import ResumeState
from shared.contracts.inference import InferResponse, Resume


def head(kept_tokens: int | None = None) -> InferResponse:
    return InferResponse(status=200, fixed="", prompt_tokens=1, kept_tokens=kept_tokens)


def data(text: str, *token_ids: int) -> dict[str, Any]:
    return {"kind": "data", "progress": [{"text": text, "token_ids": list(token_ids)}]}


def read(state: ResumeState, *messages: dict[str, Any]) -> None:
    for message in messages:
        state.add(message["progress"])


def resumed(kept_tokens: int | None) -> ResumeState:
    """A response that another engine continues after "The e" of the tokens 10, 11 and 12."""
    state = ResumeState()
    state.response_started(head(), "r1")
    read(state, data("The e", 10, 11, 12))
    state.attempt_started()
    state.response_started(head(kept_tokens), "r1")
    return state


def known(state: ResumeState) -> tuple[tuple[int, ...], int]:
    """The token ids and the characters that the next engine gets."""
    resume = Resume.model_validate(state.resume_fields("", keeps_partial_output=True))
    (choice,) = resume.choices
    return choice.token_ids, choice.text_chars


def test_tokens_generated_in_place_of_others_replace_them() -> None:
    state = resumed(kept_tokens=2)
    read(state, data("nd", 20, 21), data(".", 22))
    assert known(state) == ((10, 11, 20, 21, 22), 8)


def test_tokens_are_replaced_once_the_client_has_text_of_the_new_ones() -> None:
    state = resumed(kept_tokens=2)
    read(state, data("", 20))
    assert known(state) == ((10, 11, 12), 5)
    state.attempt_started()
    state.response_started(head(3), "r1")
    read(state, data("!", 30))
    assert known(state) == ((10, 11, 12, 30), 6)


def test_tokens_of_an_older_host_follow_those_before() -> None:
    state = resumed(kept_tokens=None)
    read(state, data("nd", 20, 21))
    assert known(state) == ((10, 11, 12, 20, 21), 7)


def test_output_after_a_replacement_can_be_expected_again() -> None:
    state = resumed(kept_tokens=2)
    messages = data("nd", 20, 21), data(".", 22)
    read(state, *messages)
    state.rewind_to([{"kind": "response"}, messages[0]])
    assert known(state) == ((10, 11, 20, 21), 7)


def takes_kept_tokens(state: ResumeState) -> bool:
    return Resume.model_validate(state.resume_fields("", keeps_partial_output=True)).takes_kept_tokens


def test_tokens_are_reported_that_take_the_place_of_others_unless_output_is_expected() -> None:
    """Of expected output the host reports only the tokens after those that it was given."""
    state = resumed(kept_tokens=2)
    assert takes_kept_tokens(state)
    read(state, data("nd", 20))
    state.rewind_to([])
    assert not takes_kept_tokens(state)


def test_expected_output_is_not_replaced() -> None:
    """It was forwarded from another engine's messages, and has to be the same."""
    state = resumed(kept_tokens=None)
    unstored = data("nd", 20)
    read(state, unstored)
    state.rewind_to([])
    state.attempt_started()
    state.response_started(head(3), "r1")
    assert state.replay_filter.covers(unstored["progress"])
    read(state, data(".", 21))
    assert known(state) == ((10, 11, 12, 20, 21), 8)


def test_tokens_in_place_of_others_are_expected_before_the_output_of_another_reader() -> None:
    """The owner of the key has resumed the response without the message that was read here."""
    state = resumed(kept_tokens=None)
    unconfirmed = data("nd", 20)
    read(state, unconfirmed)
    state.rewind([unconfirmed])
    state.attempt_started()
    state.response_started(head(2), "r1")
    for again in (data("nd", 12), data("", 20)):
        assert state.replay_filter.covers(again["progress"])
    assert not state.replay_filter
    read(state, data(".", 21))
    assert known(state) == ((10, 11, 12, 20, 21), 8)
