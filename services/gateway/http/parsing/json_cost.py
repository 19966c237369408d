"""The parsing cost of a JSON body, limited before the body is parsed.

A parser takes all its time and memory in one call, so its input is measured first: a separator
costs 1, a member of an object 8, an array or object 32, in proportion to the time and memory of
parsing and validation. Text costs nothing: a prompt may have any length.
"""

from __future__ import annotations

import re

from services.gateway.http.parsing.cooperative import SLICE_BYTES, TimeSlice
from shared.errors import PayloadTooLarge

_SMALL_BYTES = 16 * 1024
"""A body of this size costs a few milliseconds at most."""
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+){0,4096}+', re.DOTALL)


async def check_json_cost(body: bytes, limit: int) -> None:
    """Raise `PayloadTooLarge` if parsing the body would cost more than `limit`."""
    if len(body) <= _SMALL_BYTES:
        return
    time_slice = TimeSlice()
    if await _cost(body, 0, len(body), limit, time_slice) > limit and await _cost_outside_strings(body, limit, time_slice) > limit:
        raise PayloadTooLarge(
            f"The body holds more values than the limit of {limit} (an array or object counts as 32, a member of an object as 8). "
            "Split the request, or raise THAW_MAX_BODY_VALUES"
        )


def _cost_of(part: bytes) -> int:
    return part.count(b",") + 8 * part.count(b":") + 32 * (part.count(b"[") + part.count(b"{"))


async def _cost(body: bytes, start: int, end: int, limit: int, time_slice: TimeSlice) -> int:
    """Count the cost of body[start:end]; stop above `limit`."""
    cost = 0
    for at in range(start, end, SLICE_BYTES):
        cost += _cost_of(body[at : min(end, at + SLICE_BYTES)])
        if cost > limit:
            break
        await time_slice.pause()
    return cost


async def _cost_outside_strings(body: bytes, limit: int, time_slice: TimeSlice) -> int:
    """Count the cost without the text in strings.

    Counting stops at an unterminated string, where the parser refuses the body.
    """
    cost = strings = at = 0
    while at < len(body) and cost <= limit and strings <= limit:
        quote = body.find(b'"', at)
        end = quote if quote >= 0 else len(body)
        cost += await _cost(body, at, end, limit, time_slice)
        at = await _end_of_string(body, end + 1, time_slice)
        strings += 1
    return max(cost, strings)


async def _end_of_string(body: bytes, at: int, time_slice: TimeSlice) -> int:
    """Return the offset after the string that begins at `at`."""
    while at < len(body):
        run = _IN_STRING.match(body, at)
        at = run.end() if run is not None else len(body)
        await time_slice.pause()
        if body[at : at + 1] != b"\\":
            return at + 1
        if at + 1 >= len(body):
            break
    return len(body)
