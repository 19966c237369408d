"""Requests: drawn from distributions, or read from a file. The same seed gives the same requests."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log, sqrt
from pathlib import Path
from random import Random

from services.scheduler.simulation.workloads.request import Request
from shared.errors import InvalidRequest

COLUMNS = ("at", "model", "prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Gamma-distributed times between arrivals with a coefficient of variation `cv` (1: a Poisson process); the n-th model has a share of
    1/n^`zipf`; lengths are log-normal with their means and one coefficient of variation `length_cv` (0: all alike).
    """

    requests_per_second: float
    seconds: float
    cv: float = 1.0
    zipf: float = 1.0
    prompt_tokens: float = 256.0
    output_tokens: float = 128.0
    length_cv: float = 0.0

    def __post_init__(self) -> None:
        for name in ("requests_per_second", "seconds", "cv", "prompt_tokens", "output_tokens"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name.replace('_', '-')} must be positive")


def synthetic(what: Synthetic, models: Sequence[str], seed: int) -> list[Request]:
    random = Random(seed)
    shares = list(accumulate(1.0 / (n + 1) ** what.zipf for n in range(len(models))))
    shape, mean = 1.0 / what.cv**2, 1.0 / what.requests_per_second
    found: list[Request] = []
    at = random.gammavariate(shape, mean / shape)
    while at < what.seconds:
        model = random.choices(models, cum_weights=shares)[0]
        lengths = (_length(random, m, what.length_cv) for m in (what.prompt_tokens, what.output_tokens))
        found.append(Request(at, model, *lengths))
        at += random.gammavariate(shape, mean / shape)
    return found


def _length(random: Random, mean: float, cv: float) -> int:
    if cv == 0:
        return max(1, round(mean))
    variance = log(1 + cv**2)
    return max(1, round(random.lognormvariate(log(mean) - variance / 2, sqrt(variance))))


def read_trace(path: Path, models: Sequence[str]) -> list[Request]:
    """A CSV file with the columns at, model, prompt_tokens, output_tokens. Raises `InvalidRequest` that names the line."""
    known = set(models)
    found = []
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            if missing := [c for c in COLUMNS if c not in (rows.fieldnames or ())]:
                raise InvalidRequest(f"{path} lacks the columns {', '.join(missing)}")
            for number, row in enumerate(rows, start=2):
                try:
                    request = Request(float(row["at"]), row["model"], int(row["prompt_tokens"]), int(row["output_tokens"]))
                except (TypeError, ValueError) as e:
                    raise InvalidRequest(f"{path}, line {number}: {e}") from e
                if request.model not in known:
                    raise InvalidRequest(f"{path}, line {number}: no model {request.model!r} in the models file")
                found.append(request)
    except OSError as e:
        raise InvalidRequest(f"{path} cannot be read: {e}") from e
    return sorted(found, key=lambda r: r.at)
