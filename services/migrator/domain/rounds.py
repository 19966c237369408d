"""Cost of recomputation, number of rounds, and when to hand over.

Times in milliseconds.

A round recomputes `gap` tokens in a·gap + b, while the source generates the next gap at rate r:
r·(a·gap + b). Gaps shrink towards r·b / (1 - r·a) if r·a < 1; they do not shrink if the destination
is no faster than the source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MAX_ROUNDS = 8
"""Most rounds of one request before it is handed over or given up."""
MIN_ROUNDS = 3
"""Fewest rounds before a request is given up."""
SHRINKS = 0.75
"""A further round is worth its cost if it is expected to leave less than this share of the gap."""
FREAK = 4.0
"""A measurement counts as at most this multiple of its expected value."""
_KEEP = 0.85
_SURE = 3.0


@dataclass(frozen=True, slots=True)
class Speed:
    """The known a (per token) and b (per round).

    The sums are of measurements, older ones weighted less.
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

    One outlier moves it by a bounded step. A late one among the first, such as an engine's very
    first round, is corrected by a quick one: rounds are late for many reasons, and early for none.
    """
    if tokens <= 0:
        return speed
    if 0 < speed.weight < _SURE and took_ms * FREAK < speed.predict_ms(tokens):
        part = took_ms / speed.predict_ms(tokens)
        speed = Speed(speed.a * part, speed.b * part)
    took = min(took_ms, FREAK * speed.predict_ms(tokens)) if speed.weight >= _SURE else took_ms
    s = replace(
        speed,
        weight=speed.weight * _KEEP + 1,
        x=speed.x * _KEEP + tokens,
        y=speed.y * _KEEP + took,
        xx=speed.xx * _KEEP + tokens * tokens,
        xy=speed.xy * _KEEP + tokens * took,
    )
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
"""Milliseconds per KiB between two nodes before a transfer was measured: 200 MB/s."""


def transfer_speed(link: Speed, token_bytes: int) -> Speed:
    """Return the cost of sending tokens, from that of sending KiB."""
    return Speed(a=link.a * token_bytes / KIB, b=link.b)


def choose_way(tokens: int, token_bytes: int | None, recompute: Speed, link: Speed) -> Way:
    """Decide how the destination gets keys and values: the way that is predicted sooner.

    Args:
        tokens: That it lacks.
        token_bytes: Bytes of keys and values of a token; None: they cannot be sent.
        recompute: Milliseconds to compute tokens there.
        link: Milliseconds to send KiB there.
    """
    if token_bytes is None:
        return "recompute"
    return "transfer" if transfer_speed(link, token_bytes).predict_ms(tokens) < recompute.predict_ms(tokens) else "recompute"


Next = Literal["round", "hand_over", "give_up"]


def next_step(gap: int, last_gap: int, rounds: int, speed: Speed, tokens_per_second: float, pause_ms: float) -> Next:
    """Decide the next step when the destination lags the source by `gap` tokens.

    1. The gap costs less than a round's fixed cost, which further rounds do not reduce, and little:
       hand over.
    2. A further round is expected to leave much less, or the last one did, or there was none to
       judge by: another round.
    3. The pause is short enough: hand over.
    4. Rounds do not shrink: give up.

    Args:
        rounds: Rounds so far.
        last_gap: The larger gap before the last two rounds (the whole sequence before the first).
    """
    if speed.a * gap <= min(speed.b, pause_ms / 2):  # 1
        return "hand_over"
    leaves = tokens_per_second / 1e3 * speed.predict_ms(gap)
    shrinks = gap < last_gap and (leaves < SHRINKS * gap or gap < SHRINKS * last_gap)
    if rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and shrinks):  # 2
        return "round"
    return "hand_over" if speed.predict_ms(gap) <= pause_ms or _only_fixed(gap, leaves, speed) else "give_up"  # 3, 4


def _only_fixed(gap: int, leaves: float, speed: Speed) -> bool:
    """True if rounds have shrunk to their limit.

    The fixed cost of a round then causes the rest, not a slow destination.
    """
    return gap <= max(2.0, 1.5 * leaves) and speed.a * gap <= speed.b
