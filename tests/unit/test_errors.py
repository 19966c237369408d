"""Errors keep their class, fields and advice across the wire."""

import re

import pytest

from shared import errors
from shared.contracts.base import ErrorBody
from shared.errors import _BY_CODE, NotFound, ThawError, from_body


@pytest.mark.parametrize("code", sorted(_BY_CODE))
def test_round_trip(code: str) -> None:
    kind = _BY_CODE[code]
    error = kind("what happened", param="model", retry_after_ms=1500)
    back = from_body(ErrorBody.model_validate_json(error.body().model_dump_json()))
    assert type(back) is kind
    assert (back.message, back.param, back.retry_after_ms, back.should_retry) == (
        "what happened",
        "model",
        1500,
        kind.retry,
    )


def test_codes_are_unique_and_the_docstring_is_the_default_message() -> None:
    def all_kinds(root: type[ThawError]) -> list[type[ThawError]]:
        return [root, *(k for child in root.__subclasses__() for k in all_kinds(child))]

    kinds = [kind for kind in all_kinds(ThawError) if kind.__module__ == ThawError.__module__]
    assert len({k.code for k in kinds}) == len(kinds)
    assert str(_BY_CODE["queue_full"]()) == "Too many requests are waiting for this model; try again later."


def test_the_tree_that_the_module_draws_is_the_one_there_is() -> None:
    drawn = re.findall(r"^( *)[│ ├└─]*?(\w+)(?: (\d{3}))?(?: {2,}.*)?$", errors.__doc__ or "", re.MULTILINE)
    shown = {name: int(status) if status else None for _, name, status in drawn if name[0].isupper()}
    kinds = {kind.__name__: kind for kind in _BY_CODE.values()}
    assert shown.keys() == kinds.keys()
    for name, status in shown.items():
        own = "status" in vars(kinds[name]) or kinds[name].__base__ is ThawError
        assert status == (kinds[name].status if own and name != "ThawError" else None), name


def test_an_unknown_code_from_a_newer_peer_is_still_an_error() -> None:
    assert type(from_body(ErrorBody(code="from_the_future", message="m"))) is ThawError


def test_a_message_too_long_to_be_sent_keeps_its_beginning_and_its_remedy() -> None:
    error = NotFound("tensor " + "x" * 10_000_000 + " is not there; download it again")
    assert error.message.startswith("tensor xxx")
    assert error.message.endswith("xxx is not there; download it again")
    assert len(error.body().model_dump_json()) < 10_000
    assert from_body(error.body()).message == error.message
    assert NotFound("x" * 8000).message == "x" * 8000
