"""Requests for the papers' experiments.

All are generated: the Azure traces and the data sets are not part of this repository.

Arrivals of each model are a Gamma renewal process with a coefficient of variation, as AlpaServe
makes them from the Azure trace (ServerlessLLM section 7.1 and HydraServe section 8.3 follow it).
HydraServe's published generator (github.com/LLMServe/hydraserve, scripts/kubernetes/vllm: trace/
generate_trace.py, src/result_analyzer.py) then compresses 14 days (1.98 million requests) to an
hour and draws requests from them at random, down to the wanted rate: bursts are thinned. So here:
`DENSER` times as many arrivals as wanted, and a draw. Lengths are log-normal with published means.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt
from random import Random

from simulator.workloads.request import Request

DENSER = 64.0
"""The published generator has about 900; 1 keeps all bursts as they are."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of prompts and responses, with one coefficient of variation.

    Attributes:
        most: Largest number of tokens of each.
    """

    prompt: float
    output: float
    cv: float = 1.0
    most: int = 2048
    source: str = ""

    def draw(self, random: Random) -> tuple[int, int]:
        return self._draw_length(random, self.prompt), self._draw_length(random, self.output)

    def _draw_length(self, random: Random, mean: float) -> int:
        if self.cv == 0:
            return max(1, round(mean))
        variance = log(1 + self.cv**2)
        return max(1, min(self.most, round(random.lognormvariate(log(mean) - variance / 2, sqrt(variance)))))


SHAREGPT = Lengths(161, 338, source="vLLM (SOSP '23) section 6.1: means 161.31 and 337.99")
ALPACA = Lengths(19, 58, source="vLLM (SOSP '23) section 6.1: means 19.31 and 58.45")


def shares(models: int, zipf: float) -> list[float]:
    """The n-th model's part of all requests, 1/n^zipf."""
    weights = [1.0 / (n + 1) ** zipf for n in range(models)]
    return [w / sum(weights) for w in weights]


def bursts(rate: float, seconds: float, cv: float, random: Random) -> list[float]:
    """Times of a Gamma renewal process that began long before 0."""
    if rate <= 0:
        return []
    shape = 1.0 / cv**2
    scale = 1.0 / rate / shape
    at = -20.0 / rate * (1 + random.random())
    found = []
    while at < seconds:
        at += random.gammavariate(shape, scale)
        if 0 <= at < seconds:
            found.append(at)
    return found


@lru_cache(maxsize=64)
def azure_like(
    models: tuple[str, ...],
    lengths: tuple[Lengths, ...],
    rps: float,
    seconds: float,
    cv: float,
    zipf: float,
    seed: int,
    denser: float = DENSER,
) -> tuple[Request, ...]:
    """Return `rps`·`seconds` requests in bursts. The popular models are chosen at random.

    Args:
        models: Names of the models.
        lengths: Lengths of prompts and outputs, by model.
        rps: Requests in a second, of all models.
        seconds: Length of the trace.
        cv: Coefficient of variation of the time between requests.
        zipf: Exponent of the models' popularity.
        seed: Of all random choices.
        denser: Ratio of the requests to choose from to those that are returned.
    """
    random = Random(f"{seed}/{rps}/{cv}")
    parts = shares(len(models), zipf)
    random.shuffle(parts)
    pool = [(at, n) for n, part in enumerate(parts) for at in bursts(rps * part * denser, seconds, cv, random)]
    wanted = round(rps * seconds)
    drawn = random.sample(pool, wanted) if len(pool) > wanted else pool
    return tuple(Request(at, models[n], *lengths[n].draw(random)) for at, n in sorted(drawn))
