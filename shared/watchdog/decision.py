"""Decide whether a process hangs: a pure function of observations once a second.

1. A heartbeat since the last observation: the event loop runs, and the count of silent seconds
   restarts.
2. Otherwise the time since the last observation counts as silence, except
   a. more than `LONGEST_STEP_S` of it: the watcher itself did not run (suspended laptop, stopped
      process tree);
   b. what the process spent waiting for a processor: the machine is busy;
   c. all of it while the process waits for a disk, where killing does not help, or a debugger holds
      it,
   d. all of it where one of the two observations does not know how long the process waited.
3. A process hangs once its silence exceeds the limit; until its first heartbeat, and after its
   last, a longer limit holds.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_STEP_S = 2.0
_EXCUSED = frozenset("DtZX")
"""States of /proc/PID/stat: waiting for a disk, held by a debugger, ended."""


@dataclass(frozen=True)
class Limits:
    """Seconds of silence that are allowed.

    Attributes:
        loop_s: Of a running loop; 0 turns the watchdog off.
    """

    loop_s: float = 10.0
    outside_loop_s: float = 60.0
    """Before the first heartbeat (imports) and after the last (flushing traces)."""


@dataclass(frozen=True)
class Observation:
    """The heartbeats of a process, and its state, at one time.

    Attributes:
        at: Time of the observation in seconds.
        beats: Heartbeats received so far.
        is_loop_running: The last message was a heartbeat, not the end of the event loop.
        state: State letter of /proc/PID/stat.
        cpu_wait_s: Total seconds that the main thread was runnable without a processor; None: the
            kernel was not asked.
    """

    at: float
    beats: int
    is_loop_running: bool
    state: str = "S"
    cpu_wait_s: float | None = None


@dataclass(frozen=True)
class Watch:
    """The last observation of a process, and the seconds of silence until then."""

    last: Observation
    silent_s: float = 0.0


def observe(watch: Watch | None, observation: Observation) -> Watch:
    """Return the watch after one more observation; None begins one."""
    if watch is None or observation.beats != watch.last.beats or observation.is_loop_running != watch.last.is_loop_running:
        return Watch(observation)
    step = min(max(0.0, observation.at - watch.last.at), LONGEST_STEP_S)
    if observation.state in _EXCUSED or observation.cpu_wait_s is None or watch.last.cpu_wait_s is None:
        return Watch(observation, watch.silent_s)
    waited = max(0.0, observation.cpu_wait_s - watch.last.cpu_wait_s)
    return Watch(observation, watch.silent_s + max(0.0, step - waited))


def is_hung(watch: Watch, limits: Limits) -> bool:
    if limits.loop_s <= 0:
        return False
    limit = limits.loop_s if watch.last.is_loop_running else max(limits.loop_s, limits.outside_loop_s)
    return watch.silent_s >= limit


def describe(watch: Watch) -> str:
    """Return the reason for ending a hung process, as logs and `thaw ps` show it."""
    state = ", the process is stopped" if watch.last.state == "T" else ""
    return f"event loop made no progress for {watch.silent_s:.0f} s{state}"
