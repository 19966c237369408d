"""Decisions about batches: states, bounds of a key, input lines, and pacing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from services.gateway.domain.batches import batch as transitions
from services.gateway.domain.batches.batch import Batch
from services.gateway.domain.batches.input_lines import InputCheck, InputLine, parse_line
from services.gateway.domain.batches.owner_state import (
    OwnerBounds,
    OwnerState,
    StoredFile,
    add_batch,
    add_file,
    change_batch,
    end_batch,
    expire_files,
    remove_file,
)
from services.gateway.domain.batches.pacing import ModelLoad, may_start, retry_delay_s
from shared.errors import Conflict, InvalidRequest, NotFound, PayloadTooLarge, QueueFull

BOUNDS = OwnerBounds(files=2, size_bytes=100, active_batches=1, batches=2)
BATCH = Batch(id="b", endpoint="/v1/completions", input_file_id="f", completion_window="1h", window_s=3600, created_at=100)


def file(name: str = "f", size_bytes: int = 10, **fields: Any) -> StoredFile:
    defaults = {"filename": "x", "purpose": "batch", "created_at": 100, "expires_at": 1000}
    return StoredFile.model_validate({"id": name, "size_bytes": size_bytes} | defaults | fields)


def test_batch_completes() -> None:
    batch = transitions.begin(BATCH, "m", 2, 101)
    assert (batch.status, batch.model, batch.total) == ("in_progress", "m", 2)
    batch = transitions.finalize(transitions.count(batch, 1, 1), 102)
    assert transitions.request_cancel(batch, 103) == batch
    batch = transitions.finish(batch, "o", None, 104)
    assert (batch.status, batch.completed_at, batch.output_file_id, batch.completed) == ("completed", 104, "o", 1)
    for again in (transitions.finish(batch, None, None, 105), transitions.count(batch, 0, 0), transitions.fail(batch, (), 105)):
        assert again == batch


@pytest.mark.parametrize("begun", [True, False])
def test_batch_is_cancelled(begun: bool) -> None:
    batch = transitions.begin(BATCH, "m", 2, 101) if begun else BATCH
    batch = transitions.request_cancel(batch, 102)
    assert transitions.begin(batch, "m", 2, 103).status == transitions.finalize(batch, 103).status == "cancelling"
    batch = transitions.finish(batch, None, None, 104)
    assert (batch.status, batch.cancelling_at, batch.cancelled_at) == ("cancelled", 102, 104)


def test_batch_that_is_still_in_progress_expires() -> None:
    batch = transitions.finish(transitions.begin(BATCH, "m", 2, 101), None, "e", 3700)
    assert (batch.status, batch.expired_at, batch.error_file_id, batch.expires_at) == ("expired", 3700, "e", 3700)


def test_bounds_of_files() -> None:
    state = add_file(OwnerState(), file(), BOUNDS)
    with pytest.raises(PayloadTooLarge, match="101 bytes"):
        add_file(state, file("g", 91), BOUNDS)
    state = add_file(state, file("g", 90), BOUNDS)
    with pytest.raises(PayloadTooLarge, match="2 files"):
        add_file(state, file("h", 0), BOUNDS)
    assert [found.id for found in remove_file(state, "f").files] == ["g"]
    with pytest.raises(NotFound):
        remove_file(state, "h")


def test_input_of_an_active_batch_stays() -> None:
    state = add_batch(add_file(OwnerState(), file(), BOUNDS), BATCH, BOUNDS)
    assert expire_files(state, 2000) == state
    with pytest.raises(Conflict):
        remove_file(state, "f")
    with pytest.raises(QueueFull):
        add_batch(state, BATCH.model_copy(update={"id": "c"}), BOUNDS)
    state = change_batch(state, "b", lambda found: transitions.fail(found, (), 200))
    assert expire_files(state, 2000).files == ()


def test_batch_needs_a_file_of_its_purpose_and_room() -> None:
    with pytest.raises(NotFound):
        add_batch(OwnerState(), BATCH, BOUNDS)
    with pytest.raises(InvalidRequest):
        add_batch(OwnerState(files=(file(purpose="batch_output"),)), BATCH, BOUNDS)
    with pytest.raises(PayloadTooLarge):
        add_batch(OwnerState(files=(file(size_bytes=101),)), BATCH, BOUNDS)


def test_files_and_batches_that_a_key_has_are_not_added_again() -> None:
    state = add_batch(add_file(OwnerState(), file(), BOUNDS), BATCH, BOUNDS)
    state = add_file(state, file("g", 90), BOUNDS)  # the bounds leave no room for more
    assert add_batch(state, BATCH, BOUNDS) == add_file(state, file(), BOUNDS) == state


def test_oldest_ended_batch_is_forgotten() -> None:
    ended = [BATCH.model_copy(update={"id": name, "status": "failed"}) for name in ("1", "2")]
    state = add_batch(OwnerState(files=(file(),), batches=tuple(ended)), BATCH, BOUNDS)
    assert [found.id for found in state.batches] == ["2", "b"]


def test_end_of_a_batch_can_be_repeated() -> None:
    state = add_batch(add_file(OwnerState(), file(), BOUNDS), BATCH, BOUNDS)
    state = change_batch(state, "b", lambda found: transitions.begin(found, "m", 1, 101))

    def finish(found: Batch) -> Batch:
        return transitions.finish(found, "o", None, 102)

    once = end_batch(state, "b", finish, (file("o", 500),))
    assert end_batch(once, "b", finish, (file("o", 500),)) == once
    assert [found.id for found in once.files] == ["f", "o"]


def request(number: int, **fields: Any) -> bytes:
    body = {"model": "m", "prompt": "é"}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body} | fields).encode()


def test_line_has_its_body() -> None:
    parsed = parse_line(3, request(1, extra=1), "/v1/completions")
    assert parsed == InputLine(3, "1", "m", '{"model":"m","prompt":"é"}'.encode())


def test_checked_file_has_one_model_and_no_duplicate() -> None:
    check = InputCheck(max_requests=2)
    for number in (1, 2):
        check.add(parse_line(number, request(number), "/v1/completions"))
    assert (check.result(), check.count, check.model, check.is_over) == ((), 2, "m", False)
    check.add(parse_line(3, request(2), "/v1/completions"))
    assert [(e.code, e.line) for e in check.result()] == [("duplicate_custom_id", 3)]
    check.add(parse_line(4, request(4), "/v1/completions"))
    assert check.is_over
    assert [(e.code, e.line) for e in check.result()] == [("too_many_requests", 4)]


FREE = ModelLoad(interactive_waiting=0, places=4, busy=0, started=0, idle_s=0)


@pytest.mark.parametrize(
    ("load", "allowed"),
    [
        (FREE, True),
        (replace(FREE, interactive_waiting=1), False),
        (replace(FREE, busy=2), True),
        (replace(FREE, busy=3), False),
        (replace(FREE, started=3), False),
        (replace(FREE, places=1), True),
        (replace(FREE, places=1, busy=1), False),
        (replace(FREE, places=0, idle_s=59), False),
        (replace(FREE, places=0, idle_s=60), True),
        (replace(FREE, places=0, idle_s=math.inf), True),
        (replace(FREE, places=0, idle_s=math.inf, started=1), False),
    ],
)
def test_request_starts_only_in_what_interactive_requests_leave(load: ModelLoad, allowed: bool) -> None:
    assert may_start(load, start_after_idle_s=60) is allowed


@pytest.mark.parametrize(
    ("status", "failures", "asked_s", "delay_s"),
    [
        (200, 1, None, None),
        (400, 1, None, None),
        (429, 1, None, 0.5),
        (429, 9, 2.0, 60.0),
        (503, 2, 7.0, 7.0),
        (500, 3, None, 2.0),
        (500, 4, None, None),
        (504, 50, None, 60.0),
    ],
)
def test_response_is_repeated_or_final(status: int, failures: int, asked_s: float | None, delay_s: float | None) -> None:
    assert retry_delay_s(status, failures, asked_s) == delay_s
