"""Errors keep their class, fields and advice across the wire."""

import ast
import re
from pathlib import Path

import pytest

from shared import errors
from shared.contracts.base import ErrorBody
from shared.errors import _BY_CODE, NotFound, ThawError, from_body


@pytest.mark.parametrize("code", sorted(_BY_CODE))
def test_error_survives_a_round_trip_over_the_wire(code: str) -> None:
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


def _all_kinds(root: type[ThawError]) -> list[type[ThawError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _all_kinds(child))]


def test_codes_are_unique_and_the_docstring_is_the_default_message() -> None:
    kinds = [kind for kind in _all_kinds(ThawError) if kind.__module__ == ThawError.__module__]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all("code" in vars(kind) for kind in kinds)
    assert str(_BY_CODE["queue_full"]()) == "Too many requests are waiting for this model; try again later."


def test_errors_with_wire_codes_are_defined_in_one_module() -> None:
    names = {kind.__name__ for kind in _BY_CODE.values()}
    root = Path(__file__).parents[2]
    elsewhere = []
    for path in (path for package in ("services", "shared", "weights", "thaw") for path in (root / package).rglob("*.py")):
        if path == Path(errors.__file__):
            continue
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        elsewhere += [(path.name, c.name) for c in classes if names & {ast.unparse(base).rpartition(".")[2] for base in c.bases}]
    assert elsewhere == []


def test_error_tree_in_the_docstring_equals_the_real_one() -> None:
    """The error tree in the module's docstring equals the real one.

    Names, depths, codes, and the status of every class that sets one.
    """
    lines = re.findall(r"^ {4}([│ ├└─]*)(\w+) +(\d{3})? *(\w+)", errors.__doc__ or "", re.MULTILINE)
    drawn = [(len(indent) // 4, name, code, int(status) if status else None) for indent, name, status, code in lines]

    def expected(kind: type[ThawError], depth: int) -> list[tuple[int, str, str, int | None]]:
        has_status = "status" in vars(kind) or kind.__base__ in (ThawError, Exception)
        mine = (depth, kind.__name__, kind.code, kind.status if has_status else None)
        return [
            mine,
            *(line for child in kind.__subclasses__() if child in _BY_CODE.values() for line in expected(child, depth + 1)),
        ]

    assert drawn == expected(ThawError, 0)


def test_an_unknown_code_from_a_newer_peer_is_still_an_error() -> None:
    assert type(from_body(ErrorBody(code="from_the_future", message="m"))) is ThawError


def test_oversize_error_message_keeps_its_beginning_and_its_remedy() -> None:
    error = NotFound("tensor " + "x" * 10_000_000 + " is not there; download it again")
    assert error.message.startswith("tensor xxx")
    assert error.message.endswith("xxx is not there; download it again")
    assert len(error.body().model_dump_json()) < 10_000
    assert from_body(error.body()).message == error.message
    assert NotFound("x" * 8000).message == "x" * 8000
