"""Decide whether, and when, to touch the host's memory in the background (ADR 0059).

`reason_to_skip(mode, host, done_boot_id)`
 1. turned off;
 2. done since this boot;
 3. mode "on" → never skipped otherwise;
 4. not a virtual machine: its memory is its own;
 5. the host takes free memory back: touched memory would be fresh again;
 6. the host is a desktop, whose other programs need the memory.

`wait_s(pretouch, now, busy_at)`: touching begins after ten seconds without a load, and a minute
after memory was short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from weights.pool.host_backing import Host
from weights.pool.pretouch import Verdict

Mode = Literal["auto", "on", "off"]
State = Literal["waiting", "running", "complete", "skipped"]
IDLE_BEFORE_S = 10.0
AFTER_PRESSURE_S = 60.0


@dataclass(frozen=True)
class Pretouch:
    """Progress of touching the host's memory.

    Attributes:
        reason: The reason why it is skipped.
        not_before: Monotonic seconds.
    """

    state: State = "waiting"
    touched_bytes: int = 0
    reason: str = ""
    not_before: float = 0.0


def reason_to_skip(mode: Mode, host: Host, done_boot_id: str) -> str | None:
    """Return why the memory is not to be touched; None if it is."""
    if mode == "off":  # 1
        return "turned off"
    if done_boot_id and done_boot_id == host.boot_id:  # 2
        return "done since this boot"
    if mode == "on":  # 3
        return None
    if not host.is_virtual:  # 4
        return "not a virtual machine"
    if host.takes_back:  # 5
        return "the host takes free memory back"
    if host.is_desktop:  # 6
        return "the host is a desktop"
    return None


def begin(reason: str | None) -> Pretouch:
    return Pretouch() if reason is None else Pretouch("skipped", reason=reason)


def wait_s(pretouch: Pretouch, now: float, busy_at: float) -> float | None:
    """Return the seconds until touching may begin; None if it never will."""
    if pretouch.state in ("complete", "skipped"):
        return None
    return max(0.0, busy_at + IDLE_BEFORE_S - now, pretouch.not_before - now)


def record_progress(pretouch: Pretouch, touched_bytes: int, verdict: Verdict, now: float) -> Pretouch:
    """Record a step of the process that touches."""
    if verdict == "pressure":
        return replace(pretouch, state="waiting", touched_bytes=touched_bytes, not_before=now + AFTER_PRESSURE_S)
    state: State = "complete" if verdict == "complete" else "running"
    return replace(pretouch, state=state, touched_bytes=touched_bytes)


def record_end(pretouch: Pretouch, now: float) -> Pretouch:
    """Record that the process has ended, for a load or since another loader's process works."""
    if pretouch.state == "complete":
        return pretouch
    later = now + (IDLE_BEFORE_S if pretouch.touched_bytes else AFTER_PRESSURE_S)
    return replace(pretouch, state="waiting", touched_bytes=0, not_before=max(pretouch.not_before, later))
