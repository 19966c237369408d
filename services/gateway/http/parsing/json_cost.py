"""The parsing cost of a JSON body, bounded before it is parsed.

A parser takes all its time and memory in one call, so its input is measured first: a separator costs 1, a member of an object 8, an array or
object 32 (in proportion to the time and memory of parsing and validating them). Text costs nothing: a prompt of any length passes.
"""

from __future__ import annotations

import re

from services.gateway.http.parsing.cooperative import SLICE_BYTES, Pace
from shared.errors import PayloadTooLarge

_SMALL_BYTES = 16 * 1024
"""No body of this size costs more than a few milliseconds."""
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+){0,4096}+', re.DOTALL)


async def require_light(body: bytes, limit: int) -> None:
    """Raise `PayloadTooLarge` for a body whose values would take too long to parse."""
    if len(body) <= _SMALL_BYTES:
        return
    pace = Pace()
    if await _cost(body, 0, len(body), limit, pace) > limit and await _cost_outside_strings(body, limit, pace) > limit:
        raise PayloadTooLarge(
            f"The body holds more values than the limit of {limit} (an array or object counts as 32, a member of an object as 8). "
            "Split the request, or raise THAW_MAX_BODY_VALUES"
        )


def _weigh(part: bytes) -> int:
    return part.count(b",") + 8 * part.count(b":") + 32 * (part.count(b"[") + part.count(b"{"))


async def _cost(body: bytes, start: int, end: int, limit: int, pace: Pace) -> int:
    """The cost of body[start:end], counted no further than over `limit`."""
    cost = 0
    for at in range(start, end, SLICE_BYTES):
        cost += _weigh(body[at : min(end, at + SLICE_BYTES)])
        if cost > limit:
            break
        await pace.rest()
    return cost


async def _cost_outside_strings(body: bytes, limit: int, pace: Pace) -> int:
    """The cost without the text in strings. Stops at a string without an end: the parser refuses the body there."""
    cost = strings = at = 0
    while at < len(body) and cost <= limit and strings <= limit:
        quote = body.find(b'"', at)
        end = quote if quote >= 0 else len(body)
        cost += await _cost(body, at, end, limit, pace)
        at = await _end_of_string(body, end + 1, pace)
        strings += 1
    return max(cost, strings)


async def _end_of_string(body: bytes, at: int, pace: Pace) -> int:
    """Where the string that begins at `at` is over."""
    while at < len(body):
        run = _IN_STRING.match(body, at)
        at = run.end() if run is not None else len(body)
        await pace.rest()
        if body[at : at + 1] != b"\\":
            return at + 1
        if at + 1 >= len(body):
            break
    return len(body)
