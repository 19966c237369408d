"""Cost of recomputation, number of rounds, and when to hand over.

A migration moves a request in rounds. In each, the destination recomputes the `gap` tokens that it
lacks in a·gap + b milliseconds, while the source generates the next gap at rate r: r·(a·gap + b)
tokens. Gaps shrink towards r·b / (1 - r·a) if r·a < 1; they do not shrink if the destination is no
faster than the source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MAX_ROUNDS = 8
"""Most rounds of one request before it is handed over or given up."""
MIN_ROUNDS = 3
"""Fewest rounds before a request is given up."""
SHRINK_FACTOR = 0.75
"""A further round is worth its cost if it is expected to leave less than this share of the gap."""
OUTLIER_FACTOR = 4.0
"""A measurement counts as at most this multiple of its predicted value."""
_DECAY = 0.85
"""Factor of the weight of all earlier measurements at each new one."""
_TRUSTED_WEIGHT = 3.0
"""Weight of measurements from which on a prediction bounds outliers."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Learned cost of a round: a·tokens + b.

    Attributes:
        a: Milliseconds per token.
        b: Milliseconds per round.
        weight: Number of measurements, older ones weighted less, as in the sums below.
        x: Sum of tokens.
        y: Sum of milliseconds.
        xx: Sum of squared tokens.
        xy: Sum of tokens times milliseconds.
    """

    a: float = 0.5
    b: float = 20.0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def predict_ms(self, tokens: int) -> float:
        return self.a * tokens + self.b


def learn_speed(speed: Speed, tokens: int, took_ms: float) -> Speed:
    """Return `speed` after `tokens` were recomputed in `took_ms`.

    One outlier changes it by a bounded step. A slow outlier among the first rounds, such as an
    engine's very first, is corrected by the next quick round: rounds are late for many reasons, and
    early for none.
    """
    if tokens <= 0:
        return speed
    if 0 < speed.weight < _TRUSTED_WEIGHT and took_ms * OUTLIER_FACTOR < speed.predict_ms(tokens):
        ratio = took_ms / speed.predict_ms(tokens)
        speed = Speed(speed.a * ratio, speed.b * ratio)
    is_trusted = speed.weight >= _TRUSTED_WEIGHT
    bounded_ms = min(took_ms, OUTLIER_FACTOR * speed.predict_ms(tokens)) if is_trusted else took_ms
    s = replace(
        speed,
        weight=speed.weight * _DECAY + 1,
        x=speed.x * _DECAY + tokens,
        y=speed.y * _DECAY + bounded_ms,
        xx=speed.xx * _DECAY + tokens * tokens,
        xy=speed.xy * _DECAY + tokens * bounded_ms,
    )
    # A least-squares line through the measurements; of nearly equal rounds only `a` is learned.
    mean_x, mean_y = s.x / s.weight, s.y / s.weight
    variance = s.xx / s.weight - mean_x * mean_x
    if variance <= 0.01 * mean_x * mean_x:
        b = min(s.b, mean_y)
        return replace(s, a=(mean_y - b) / mean_x, b=b)
    a = min(max(0.0, (s.xy / s.weight - mean_x * mean_y) / variance), mean_y / mean_x)
    return replace(s, a=a, b=mean_y - a * mean_x)


Way = Literal["recompute", "transfer"]
KIB = 1024
UNKNOWN_LINK = Speed(a=KIB / 200e6 * 1e3, b=10.0)
"""Cost of sending KiB between two nodes before a transfer was measured: 200 MB/s."""


def transfer_speed(link: Speed, token_bytes: int) -> Speed:
    """Return the cost of sending the keys and values of tokens, from that of sending KiB."""
    return Speed(a=link.a * token_bytes / KIB, b=link.b)


def choose_way(tokens: int, token_bytes: int | None, recompute: Speed, link: Speed) -> Way:
    """Decide how the destination gets keys and values: the way that is predicted sooner.

    Args:
        tokens: Number of tokens that the destination lacks.
        token_bytes: Bytes of keys and values of a token; None: they cannot be sent.
        recompute: Cost of computing tokens on the destination.
        link: Cost of sending KiB to the destination.
    """
    if token_bytes is None:
        return "recompute"
    return "transfer" if transfer_speed(link, token_bytes).predict_ms(tokens) < recompute.predict_ms(tokens) else "recompute"


Next = Literal["round", "hand_over", "give_up"]


def next_step(gap: int, last_gap: int, rounds: int, speed: Speed, tokens_per_second: float, pause_ms: float) -> Next:
    """Decide the next step when the destination lags the source by `gap` tokens.

    1. The gap costs less than a round's fixed cost, which further rounds do not reduce, and less
       than half of the pause: hand over.
    2. There were too few rounds to judge by, or a further round is expected to leave much less, or
       the last one did: another round.
    3. The pause is short enough, or further rounds cannot shorten it: hand over.
    4. Rounds do not shrink: give up.

    Args:
        gap: Tokens that the destination lacks now.
        last_gap: The larger gap before the last two rounds (the whole sequence before the first).
        rounds: Rounds so far.
        speed: Cost of a round.
        tokens_per_second: Rate of the source.
        pause_ms: Longest pause of the client's stream that a hand-over should cause.
    """
    if speed.a * gap <= min(speed.b, pause_ms / 2):  # 1
        return "hand_over"
    leaves = tokens_per_second / 1e3 * speed.predict_ms(gap)
    shrinks = gap < last_gap and (leaves < SHRINK_FACTOR * gap or gap < SHRINK_FACTOR * last_gap)
    if rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and shrinks):  # 2
        return "round"
    if speed.predict_ms(gap) <= pause_ms or _is_at_limit(gap, leaves, speed):  # 3
        return "hand_over"
    return "give_up"  # 4


def _is_at_limit(gap: int, leaves: float, speed: Speed) -> bool:
    """True if the fixed cost of a round causes the remaining gap, not a slow destination."""
    return gap <= max(2.0, 1.5 * leaves) and speed.a * gap <= speed.b
