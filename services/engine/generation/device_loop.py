"""The computing thread of a device: one step of one model at a time.

The thread of a dedicated engine has one batcher, that of an executor one for each of its models.
`services.engine.domain.step_order` chooses the model of the next step, by the API keys whose
requests they have. While several models have work, each computes a long prompt in several steps
(`Batcher.step`). Commands of all models take effect before each step: they wait for no turn.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

import torch

from services.engine.domain.fair_slots import Flow
from services.engine.domain.step_order import ComputeTime, Priorities, Turn, Work, next_turn, update_priorities
from services.engine.generation.flow_work import FlowWork

log = logging.getLogger(__name__)
R = TypeVar("R")


class Steps(Protocol):
    """Work that the thread does in steps, as `Batcher`."""

    on_command: Callable[[], None]
    required_requests: float | None

    def has_commands(self) -> bool: ...
    def next_step_at(self, now: float) -> float: ...
    def flow_work(self, now: float) -> Mapping[Flow, FlowWork]: ...
    def step(self, *, is_contended: bool = False, computes: bool = True) -> bool: ...


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
        self._time = ComputeTime()
        self._batchers: dict[str, tuple[Steps, Future[None]]] = {}
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
            try:
                self._on_step(name)
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
            try:
                self._take_jobs(wait_s)
                wait_s = self._compute()
            except Exception as e:  # without the thread all requests of the process would wait for ever
                log.exception("the computing thread failed")
                self._fail_all(e)
                wait_s = None

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
        if len(self._batchers) > 1:
            for name in [name for name, (batcher, _) in self._batchers.items() if batcher.has_commands()]:
                self._step(name, computes=False)
        now = time.monotonic()
        due = {name: batcher.next_step_at(now) for name, (batcher, _) in self._batchers.items()}
        ready = [name for name, at in due.items() if at <= now]
        if not ready:
            self._time.admit(())
            self._on_step(None)
            return min((at - now for at in due.values() if at < float("inf")), default=None)
        if len(self._batchers) == 1:
            self._step(ready[0])
            return 0.0
        turn = self._next_turn(ready, now)
        begun = time.monotonic()
        if self._step(turn.work.lane, is_contended=len(ready) > 1):
            self._time.charge(turn, time.monotonic() - begun)
        return 0.0

    def _next_turn(self, ready: list[str], now: float) -> Turn:
        standings = ((name, batcher.required_requests) for name, (batcher, _) in self._batchers.items())
        required = {name: needed for name, needed in standings if needed is not None}
        self._priorities = update_priorities(self._priorities, required, now)
        works = [
            Work(name, flow, work.weight, work.deadline, required.get(name, 0.0), name in self._priorities.low)
            for name in ready
            for flow, work in self._batchers[name][0].flow_work(now).items()
        ]
        self._time.admit(works)
        return next_turn([(work, self._time.tags(work)) for work in works], now)

    def _step(self, name: str, *, is_contended: bool = False, computes: bool = True) -> bool:
        """Run a step of one lane, and return whether the lane continues."""
        batcher, ended = self._batchers[name]
        try:
            self._on_step(name)
            if batcher.step(is_contended=is_contended, computes=computes):
                return True
        except Exception as e:  # a process boundary: only this model fails
            log.exception("a batcher failed", extra={"instance": name})
            self._remove(name)
            ended.set_exception(e)
            return False
        self._remove(name)
        ended.set_result(None)
        return False

    def _fail_all(self, error: Exception) -> None:
        """End all batchers, whose engines end with the error."""
        for name, (_, ended) in list(self._batchers.items()):
            self._remove(name)
            ended.set_exception(error)

    def _add(self, name: str, batcher: Steps, ended: Future[None]) -> None:
        if ended.set_running_or_notify_cancel():
            self._batchers[name] = batcher, ended

    def _remove(self, name: str) -> None:
        del self._batchers[name]
        self._time.forget(name)

    def _end(self) -> None:
        self._is_stopped = True


def _ignore(_: str | None) -> None:
    """Record nothing."""
