"""Requests drawn from distributions. Equal seeds give equal requests.

The repository contains no data set and no trace of others: the requests have their published
statistics only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, log, sqrt
from random import Random
from statistics import NormalDist
from typing import Literal

from shared.errors import InvalidRequest
from simulator.workloads.request import Request


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean token counts, with one coefficient of variation (log-normal; 0: constant).

    Attributes:
        source: Where the means are published.
    """

    prompt: float
    output: float
    cv: float = 1.0
    source: str = ""


DATASETS = {
    "sharegpt": Lengths(161, 338, source="vLLM (SOSP '23) section 6.1"),
    "alpaca": Lengths(19, 58, source="vLLM (SOSP '23) section 6.1"),
    "gsm8k": Lengths(60, 91, source="answers: ShareGPT's over 3.7 (ServerlessLLM section 7.3); prompts: ours"),
    "humaneval": Lengths(171, 98, cv=0.5, source="means: DistServe (OSDI '24) section 6.1; the spread is ours"),
    "longbench": Lengths(1738, 91, cv=0.5, source="means: DistServe (OSDI '24) section 6.1; the spread is ours"),
}
_POSITIVE = {
    "requests_per_second": "--rps",
    "seconds": "--duration",
    "cv": "--cv",
    "prompt_tokens": "--prompt-tokens",
    "output_tokens": "--output-tokens",
}
AZURE_SIGMA = NormalDist().inv_cdf(0.996) - NormalDist().inv_cdf(0.186)
"""Sigma of log-normal rates whose top 18.6 % have 99.6 % of invocations (Shahrad et al., §3)."""
BASE_RUN = 4.0
"""Mean run length in the unchanged trace of Tangram §5.1; Thaw's assumption."""


@dataclass(frozen=True, slots=True)
class Locality:
    """A level of Tangram §5.1.

    Attributes:
        run: Mean number of consecutive requests for one model; 0: never two.
    """

    cv: float
    run: float


LOCALITY = {
    "L1": Locality(0.25, 0.0),
    "L2": Locality(0.5, BASE_RUN / 2),
    "L3": Locality(1.0, BASE_RUN),
    "L4": Locality(2.0, BASE_RUN * 2),
}


@dataclass(frozen=True, slots=True)
class Burst:
    """From `at` on, for `seconds`, the arrival rate is multiplied by `times`."""

    at: float
    seconds: float
    times: float


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Gamma-distributed interarrival times with a coefficient of variation `cv`.

    With `cv` 1 they are a Poisson process.

    Attributes:
        popularity: "zipf": the n-th model has a share of 1/n^`zipf`; "azure": quantiles of
            log-normal rates.
        run: Mean number of consecutive requests for one model; None: models are drawn
            independently; 0: never the same twice.
        each: Arrivals are a process of each model, as AlpaServe makes them from the Azure trace.
        models_shuffled: The seed draws which model is popular.
    """

    requests_per_second: float
    seconds: float
    cv: float = 1.0
    zipf: float = 1.0
    prompt_tokens: float = 256.0
    output_tokens: float = 128.0
    length_cv: float = 0.0
    popularity: Literal["zipf", "azure"] = "zipf"
    run: float | None = None
    each: bool = False
    models_shuffled: bool = False
    bursts: tuple[Burst, ...] = ()

    def __post_init__(self) -> None:
        for name, option in _POSITIVE.items():
            if not 0 < getattr(self, name) < inf:
                raise InvalidRequest(f"{option} must be positive")


def synthetic(what: Synthetic, models: Sequence[str], seed: int) -> list[Request]:
    random = Random(seed)
    shares = popularity(what, len(models))
    if what.models_shuffled:
        random.shuffle(shares)
    if what.each:
        return _draw_each(what, models, shares, random)
    choose = _runs(models, shares, what.run, random)
    found: list[Request] = []
    for at in _arrivals(what, what.requests_per_second, random):
        model = next(choose)
        lengths = (_length(random, m, what.length_cv) for m in (what.prompt_tokens, what.output_tokens))
        found.append(Request(at, model, *lengths))
    return found


def _draw_each(what: Synthetic, models: Sequence[str], shares: Sequence[float], random: Random) -> list[Request]:
    found = []
    for model, share in zip(models, shares, strict=True):
        for at in _arrivals(what, what.requests_per_second * share, random, settled=True):
            lengths = (_length(random, m, what.length_cv) for m in (what.prompt_tokens, what.output_tokens))
            found.append(Request(at, model, *lengths))
    return sorted(found, key=lambda r: (r.at, r.model))


def _arrivals(what: Synthetic, rate: float, random: Random, settled: bool = False) -> Iterator[float]:
    """Return times in [0, seconds).

    Args:
        settled: The process is in progress; else it starts with a gap.
    """
    shape, mean = 1.0 / what.cv**2, 1.0 / rate
    at = -20.0 * mean * (1 + random.random()) if settled else 0.0
    while True:
        gap = random.gammavariate(shape, mean / shape)
        at += gap / next((b.times for b in what.bursts if b.at <= at < b.at + b.seconds), 1.0)
        if at >= what.seconds:
            return
        if at >= 0:
            yield at


def popularity(what: Synthetic, count: int) -> list[float]:
    """Return the models' shares, the most popular first; their sum is 1."""
    if what.popularity == "azure":
        normal = NormalDist()
        weights = [exp(AZURE_SIGMA * normal.inv_cdf(1 - (n + 0.5) / count)) for n in range(count)]
    else:
        weights = [1.0 / (n + 1) ** what.zipf for n in range(count)]
    return [w / sum(weights) for w in weights]


def _runs(models: Sequence[str], shares: Sequence[float], run: float | None, random: Random) -> Iterator[str]:
    cumulated = list(accumulate(shares))
    last = ""
    while True:
        model = random.choices(models, cum_weights=cumulated)[0]
        if run == 0 and model == last and len(models) > 1:
            continue
        last = model
        yield model
        while run is not None and run > 1 and random.random() < 1 - 1 / run:
            yield model


def _length(random: Random, mean: float, cv: float) -> int:
    if cv == 0:
        return max(1, round(mean))
    variance = log(1 + cv**2)
    return max(1, round(random.lognormvariate(log(mean) - variance / 2, sqrt(variance))))
