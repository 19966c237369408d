"""The computing thread of a device: one step of one model at a time.

The thread of a dedicated engine has one batcher, that of an executor one for each of its models.
`services.engine.domain.step_order` chooses the model of the next step. While several models have
work, each computes a long prompt in several steps (`Batcher.step`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from services.engine.domain.step_order import Lane, Priorities, Turn, admit, charge, next_turn, update_priorities

log = logging.getLogger(__name__)
R = TypeVar("R")


class Steps(Protocol):
    """Work that the thread does in steps, as `Batcher`."""

    on_command: Callable[[], None]
    required_requests: float | None

    def next_step_at(self, now: float) -> float: ...
    def deadline(self, now: float) -> float | None: ...
    def step(self, *, is_contended: bool = False) -> bool: ...


OnStep = Callable[[str | None], None]


class DeviceLoop:
    """Owns the computing thread. All methods may be called from any thread."""

    def __init__(self, threads: int = 0, on_step: OnStep | None = None) -> None:
        """Start the thread.

        Args:
            threads: Threads that torch computes with; 0: as many as it chooses.
            on_step: The thread calls it with a lane's name before each step or job of the lane, and
                with None before it waits.
        """
        self._threads = threads
        self._on_step = on_step if on_step is not None else _ignore
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lanes: dict[str, Lane] = {}
        self._batchers: dict[str, tuple[Steps, Future[None]]] = {}
        self._busy: set[str] = set()
        self._last_tag_s = 0.0
        self._priorities = Priorities()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def submit(self, name: str, work: Callable[[], R]) -> Future[R]:
        """Run `work` between two steps, on behalf of the lane `name`."""
        done: Future[R] = Future()

        def job() -> None:
            if not done.set_running_or_notify_cancel():
                return
            self._on_step(name)
            try:
                done.set_result(work())
            except BaseException as e:  # a thread boundary: the caller gets it
                done.set_exception(e)

        self._inbox.put(job)
        return done

    def serve(self, name: str, batcher: Steps) -> Future[None]:
        """Run the batcher's steps until it is stopped.

        The future ends when the batcher is stopped, or with the exception of a step that failed
        outside of the model.
        """
        ended: Future[None] = Future()
        batcher.on_command = self.wake
        self._inbox.put(partial(self._add, name, batcher, ended))
        return ended

    def wake(self) -> None:
        """Make the thread look for work."""
        self._inbox.put(None)

    def stop(self) -> None:
        """End the thread after the step in progress, without waiting for it."""
        self._inbox.put(self._end)

    # On the thread

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        wait_s: float | None = None
        while not self._is_stopped:
            self._take_jobs(wait_s)
            wait_s = self._compute()

    def _take_jobs(self, wait_s: float | None) -> None:
        """Run the queued jobs. Wait for one for up to `wait_s` seconds; None: without limit."""
        try:
            job = self._inbox.get(block=wait_s != 0, timeout=wait_s)
            while not self._is_stopped:
                if job is not None:
                    job()
                job = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _compute(self) -> float | None:
        """Run one step, and return the seconds until the next one; None: no step is due."""
        now = time.monotonic()
        due = {name: batcher.next_step_at(now) for name, (batcher, _) in self._batchers.items()}
        ready = {name for name, at in due.items() if at <= now}
        for name in ready - self._busy:
            others = [self._lanes[other] for other in ready & self._busy]
            self._lanes[name] = admit(self._lanes[name], others, self._last_tag_s)
        self._busy = ready
        if not ready:
            self._on_step(None)
            return min((at - now for at in due.values() if at < float("inf")), default=None)
        self._step(self._next_turn(ready, now), is_contended=len(ready) > 1)
        return 0.0

    def _next_turn(self, ready: set[str], now: float) -> Turn:
        if len(ready) == 1:
            return Turn(self._lanes[next(iter(ready))])
        standings = ((name, batcher.required_requests) for name, (batcher, _) in self._batchers.items())
        required = {name: needed for name, needed in standings if needed is not None}
        self._priorities = update_priorities(self._priorities, required, now)
        lanes = (
            replace(
                self._lanes[name],
                deadline=self._batchers[name][0].deadline(now),
                required=required.get(name, 0.0),
                is_low=name in self._priorities.low,
            )
            for name in ready
        )
        return next_turn(lanes, now)

    def _step(self, turn: Turn, *, is_contended: bool) -> None:
        name = turn.lane.name
        batcher, ended = self._batchers[name]
        lane = self._lanes[name]
        self._last_tag_s = max(self._last_tag_s, lane.tag_s)
        self._on_step(name)
        begun = time.monotonic()
        try:
            if batcher.step(is_contended=is_contended):
                self._lanes[name] = charge(lane, time.monotonic() - begun, has_precedence=turn.has_precedence)
                return
        except Exception as e:  # a process boundary: only this model fails
            log.exception("a batcher failed", extra={"instance": name})
            self._remove(name)
            ended.set_exception(e)
            return
        self._remove(name)
        ended.set_result(None)

    def _add(self, name: str, batcher: Steps, ended: Future[None]) -> None:
        if ended.set_running_or_notify_cancel():
            self._lanes[name] = Lane(name)
            self._batchers[name] = batcher, ended

    def _remove(self, name: str) -> None:
        del self._batchers[name], self._lanes[name]
        self._busy.discard(name)

    def _end(self) -> None:
        self._is_stopped = True


def _ignore(_: str | None) -> None:
    """Record nothing."""
