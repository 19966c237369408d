"""Event loops whose clock stands still while the tests' process does not run.

On a machine with fewer processors than busy processes, a test may not run for seconds. Afterwards
asyncio would handle the timers that became due before the messages that arrived: every request on
its way would time out, and every peer would count as silent. With this clock, timers count only the
time in which their loop runs. Code that computes for too long on the loop is no pause: its time
counts. `time.monotonic` is unchanged.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import base_events

_LONGEST_WAIT_S = 0.05
"""A loop with timers reads its clock at least this often."""
PAUSED_S = 0.15
"""A clock that was not read for so long shows that the loop did not run."""


def install() -> None:
    """Give all event loops of this process such a clock."""
    base_events.MAXIMUM_SELECT_TIMEOUT = _LONGEST_WAIT_S  # type: ignore[attr-defined]  # not in typeshed
    base_events.BaseEventLoop.time = _read_clock  # type: ignore[assignment, method-assign]


def _read_clock(loop: asyncio.BaseEventLoop) -> float:
    now, computed, state = time.monotonic(), time.thread_time(), loop.__dict__
    since_s = now - state.get("_clock_read_at", now)
    if since_s > PAUSED_S:
        ran_s = _LONGEST_WAIT_S + computed - state["_clock_read_computed"]
        state["_paused_s"] = state.get("_paused_s", 0.0) + max(0.0, since_s - ran_s)
    state["_clock_read_at"], state["_clock_read_computed"] = now, computed
    return now - float(state.get("_paused_s", 0.0))
