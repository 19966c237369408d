"""Threads for the calls of a driver that may hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")
_ANSWERS_WITHIN_S = 5.0
_TICKS = 5


class DriverThread:
    """Makes calls one after another in a thread of its own.

    A call that hangs keeps this thread, and no other one. Until it has returned, calls fail at
    once.
    """

    def __init__(self, within_s: float = _ANSWERS_WITHIN_S) -> None:
        """Create it.

        Args:
            within_s: Seconds in which a call has to return. A pause of this process counts less.
        """
        self.within_s = within_s
        self._turn = threading.Lock()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[_Given, _Found], *given: _Given.args, **named: _Given.kwargs) -> _Found:
        """Call `function`, and return its result. Blocking.

        Raises:
            TimeoutError: It does not return in time, or an earlier call has not returned yet.
        """
        return self.call_within(self.within_s, partial(function, *given, **named))

    def call_within(self, within_s: float, call: Callable[[], _Found]) -> _Found:
        """Make a call that may take other than the usual time. Raises as `call`."""
        with self._turn:
            if self._last is not None and not self._last.done():
                raise TimeoutError
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="driver", daemon=True)
                self._thread.start()
            self._last = answer = Future[_Found]()
            self._calls.put((answer, call))
            for _ in range(_TICKS):
                if wait((answer,), within_s / _TICKS).done:
                    return answer.result()
            raise TimeoutError

    def _run(self) -> None:
        while True:
            answer, call = self._calls.get()
            try:
                answer.set_result(call())
            except BaseException as e:  # the caller's
                answer.set_exception(e)


async def run_in_own_thread(function: Callable[_Given, _Found], *given: _Given.args, **named: _Given.kwargs) -> _Found:
    """Call `function` in a thread of its own, for which this process does not wait when it ends.

    The threads of `asyncio.to_thread` are few, and a process that ends waits for all of them.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Found] = loop.create_future()
    context = copy_context()

    def call() -> None:
        found: Future[_Found] = Future()
        try:
            found.set_result(context.run(function, *given, **named))
        except BaseException as e:  # the caller's
            found.set_exception(e)
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(_settle, answer, found)

    threading.Thread(target=call, name=f"driver {function.__name__}", daemon=True).start()
    return await answer


def _settle(answer: asyncio.Future[_Found], found: Future[_Found]) -> None:
    if answer.done():  # cancelled
        return
    if (error := found.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(found.result())
