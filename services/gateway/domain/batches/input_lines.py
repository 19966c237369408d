"""The lines of a batch's input file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from services.gateway.domain.batches.batch import RESPONSES, BatchError

_MAX_ID_CHARS = 512


@dataclass(frozen=True)
class InputLine:
    """One request of a batch.

    Attributes:
        number: Number of its line, from 1; blank lines count.
        body: JSON of the request's body.
    """

    number: int
    custom_id: str
    model: str
    body: bytes


def parse_line(number: int, line: bytes, endpoint: str) -> InputLine | BatchError:
    """Parse a line, or say what is wrong with it."""

    def fault(code: str, message: str, param: str | None = None) -> BatchError:
        return BatchError(code=code, message=message, line=number, param=param)

    try:
        data = from_json(line)
    except ValueError as e:
        return fault("invalid_json_line", f"This line is not parseable as valid JSON: {str(e)[:200]}.")
    if not isinstance(data, dict):
        return fault("invalid_json_line", "This line is not a JSON object.")
    custom_id, body = data.get("custom_id"), data.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        return fault("invalid_custom_id", f"`custom_id` must be a string of 1 to {_MAX_ID_CHARS} characters.", "custom_id")
    if data.get("method") != "POST":
        return fault("invalid_method", "`method` must be POST.", "method")
    if data.get("url") != endpoint:
        return fault("invalid_url", f"The URL of this request must be the batch's endpoint, {endpoint}.", "url")
    if not isinstance(body, dict):
        return fault("invalid_request", "`body` must be an object.", "body")
    if (error := _check_body(body)) is not None:
        return fault("invalid_request", error[0], error[1])
    if endpoint == RESPONSES:
        # Thousands of stored responses would displace those that the key's clients continue.
        body.setdefault("store", False)
    return InputLine(number, custom_id, body["model"], to_json(body))


def _check_body(body: dict[str, Any]) -> tuple[str, str] | None:
    if not isinstance(body.get("model"), str) or not body["model"]:
        return "The body must name a `model`.", "body.model"
    if body.get("stream"):
        return "Requests of a batch cannot be streamed. Remove `stream`.", "body.stream"
    return None


class InputCheck:
    """Check the lines of a file one after another.

    Attributes:
        errors: The first faults.
        count: Number of requests.
        model: The model of all requests; None before the first.
    """

    _MAX_ERRORS = 50

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._lines_by_id: dict[str, int] = {}
        self._has_too_many = False
        self.errors: list[BatchError] = []
        self.model: str | None = None

    @property
    def count(self) -> int:
        return len(self._lines_by_id)

    @property
    def is_over(self) -> bool:
        """True if reading on is of no use."""
        return self._has_too_many or len(self.errors) >= self._MAX_ERRORS

    def add(self, line: InputLine | BatchError) -> None:
        if isinstance(line, BatchError):
            self.errors.append(line)
            return
        if (first := self._lines_by_id.setdefault(line.custom_id, line.number)) != line.number:
            message = f"The custom_id of this request is that of line {first} as well."
            self.errors.append(BatchError(code="duplicate_custom_id", message=message, line=line.number, param="custom_id"))
        self.model = self.model or line.model
        if line.model != self.model:
            message = f"All requests of a batch must have the same model, and the first one has {self.model[:100]}."
            self.errors.append(BatchError(code="mismatched_model", message=message, line=line.number, param="body.model"))
        if self.count > self._max_requests:
            message = f"The file has more than {self._max_requests} requests. Split it"
            self.errors = [BatchError(code="too_many_requests", message=f"{message}.", line=line.number)]
            self._has_too_many = True

    def result(self) -> tuple[BatchError, ...]:
        """Return the faults of the whole file; empty if it is valid."""
        if not self.errors and not self.count:
            return (BatchError(code="empty_file", message="The input file has no request."),)
        return tuple(self.errors)
