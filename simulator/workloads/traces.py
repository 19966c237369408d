"""Requests read from files. Errors name file and line.

- `at, model, prompt_tokens, output_tokens`: seconds, and a name of the models file.
- Azure LLM inference traces of 2023: `TIMESTAMP, ContextTokens, GeneratedTokens`. They name no
  model:
  models are assigned by `popularity`.
- BurstGPT: `Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type`. Seconds;
  failed requests are left out; its models map to the models file in order of appearance.
- Recorded: one JSON object per line, as `thaw trace --export` writes them
  (`shared.contracts.traces.RequestTrace`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from math import isfinite
from pathlib import Path
from random import Random

from pydantic import ValidationError

from shared.contracts.traces import RequestTrace
from shared.errors import InvalidRequest
from simulator.workloads.request import Request

OURS = ("at", "model", "prompt_tokens", "output_tokens")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Model", "Request tokens", "Response tokens")
Row = dict[str, str]


def read_trace(path: Path, models: Sequence[str], seed: int = 0, speed: float = 1.0, zipf: float = 1.0) -> list[Request]:
    """Read a trace; the columns, or the suffix `.jsonl`, determine its layout.

    Args:
        path: The file.
        speed: Replay speed.

    Raises:
        InvalidRequest: The file is invalid.
    """
    if speed <= 0:
        raise InvalidRequest("--speed must be positive")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            found = list(_read_recorded(path, file, models) if path.suffix == ".jsonl" else _table(path, file, models, seed, zipf))
    except OSError as e:
        raise InvalidRequest(f"{path} cannot be read: {e}") from e
    except UnicodeDecodeError as e:
        raise InvalidRequest(f"{path} is not text: {e}") from e
    if not found:
        raise InvalidRequest(f"{path} holds no request")
    first = min(r.at for r in found) if path.suffix == ".jsonl" else min(0.0, min(r.at for r in found))
    return sorted((Request((r.at - first) / speed, r.model, r.prompt_tokens, r.output_tokens) for r in found), key=lambda r: r.at)


def _table(path: Path, file: Iterator[str], models: Sequence[str], seed: int, zipf: float) -> Iterator[Request]:
    rows = csv.DictReader(file)
    columns = set(rows.fieldnames or ())
    take: Callable[[Row], Request | None]
    if columns.issuperset(OURS):
        take = _parse_row
    elif columns.issuperset(AZURE):
        take = _Azure(models, seed, zipf)
    elif columns.issuperset(BURSTGPT):
        take = _BurstGPT(models)
    else:
        if not columns:
            raise InvalidRequest(f"{path} is empty")
        missing = ", ".join(c for c in OURS if c not in columns)
        raise InvalidRequest(
            f"{path} has no columns {missing} (or those of an Azure LLM trace: {', '.join(AZURE)}; or of BurstGPT: {', '.join(BURSTGPT)})"
        )
    known = set(models)
    for number, row in enumerate(rows, start=2):
        try:
            request = take(row)
        except (TypeError, ValueError) as e:
            raise InvalidRequest(f"{path}, line {number}: {e}") from e
        if request is None:
            continue
        if not isfinite(request.at) or request.prompt_tokens < 0 or request.output_tokens < 1:
            raise InvalidRequest(
                f"{path}, line {number}: a time must be a number, a prompt at least 0 tokens and an answer at least 1"
            )
        if request.model not in known:
            raise InvalidRequest(f"{path}, line {number}: no model {request.model!r} in the models file")
        yield request


def _parse_row(row: Row) -> Request:
    return Request(float(row["at"]), row["model"], int(row["prompt_tokens"]), int(row["output_tokens"]))


class _Azure:
    def __init__(self, models: Sequence[str], seed: int, zipf: float) -> None:
        self._models, self._random = models, Random(f"azure:{seed}")
        self._shares = list(accumulate(1.0 / (n + 1) ** zipf for n in range(len(models))))
        self._first: datetime | None = None

    def __call__(self, row: Row) -> Request:
        # The traces have seven digits of a second; datetime accepts six.
        whole, _, fraction = row["TIMESTAMP"].strip().partition(".")
        at = datetime.fromisoformat(whole).replace(tzinfo=UTC)
        seconds = float(f"0.{fraction}") if fraction else 0.0
        self._first = self._first or at
        model = self._random.choices(self._models, cum_weights=self._shares)[0]
        since = (at - self._first).total_seconds() + seconds
        return Request(since, model, int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))


class _BurstGPT:
    def __init__(self, models: Sequence[str]) -> None:
        self._models = models
        self._given: dict[str, str] = {}

    def __call__(self, row: Row) -> Request | None:
        answer = int(row["Response tokens"])
        if answer <= 0:
            return None
        model = self._given.setdefault(row["Model"], self._models[len(self._given) % len(self._models)])
        return Request(float(row["Timestamp"]), model, int(row["Request tokens"]), answer)


def _read_recorded(path: Path, file: Iterator[str], models: Sequence[str]) -> Iterator[Request]:
    known = set(models)
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            trace = RequestTrace.model_validate_json(line)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the record"
            raise InvalidRequest(f"{path}, line {number}: {where}: {first['msg']}") from e
        if trace.ttft_ms is None:
            continue  # it got no token
        if trace.model not in known:
            raise InvalidRequest(f"{path}, line {number}: no model {trace.model!r} in the models file")
        yield Request(trace.received, trace.model, trace.prompt_tokens, max(1, trace.completion_tokens))
