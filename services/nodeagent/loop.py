"""The loop that owns a nodeagent's state: events in, decisions, effects out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from services.nodeagent.domain.decide import decide
from services.nodeagent.domain.events import Effect, Event, Tick
from services.nodeagent.domain.state import NodeState, deadlines

_IDLE_S = 60.0
_SHORTEST_S = 0.005
PAUSED_S = 1.0
"""An event or a deadline this late shows that the process was paused, or starved of CPU time."""
_SETTLED_S = 1.0
"""Time in which the messages of a pause arrive."""


class Loop:
    """Runs the loop.

    Args:
        state: The node's state.
        perform: Performs one effect without blocking. It is called in order; slow effects post
            their outcome as an event.
    """

    def __init__(self, state: NodeState, perform: Callable[[Effect], None]) -> None:
        self.state = state
        self._perform = perform
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._ticked = False
        self._settled_at = float("-inf")
        """No `Tick` before this time: the messages of a pause of the process arrive.

        Deadlines are put off once for each pause. If the process is still starved of CPU time, they
        are handled.
        """
        self._was_late = False
        """The last wait was late: another late one belongs to the same pause."""
        self._must_tick = False
        """A deadline was put off already, and the wait after that was late too."""

    def post(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def run(self) -> None:
        while True:
            event = await self._wait_for_event()
            self.state, effects = decide(self.state, event, time.monotonic())
            for effect in effects:
                self._perform(effect)
            self._changed.set()
            if not isinstance(event, Tick):
                self._events.task_done()

    async def wait_until_idle(self) -> None:
        """Return when no event waits, and the effects of all have been performed."""
        await self._events.join()

    async def wait_until(self, predicate: Callable[[NodeState], bool], within_s: float) -> bool:
        """Wait until the state satisfies `predicate`.

        False: it did not within `within_s` seconds.
        """
        try:
            async with asyncio.timeout(within_s):
                while not predicate(self.state):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _wait_for_event(self) -> Event:
        """The next event, or a `Tick` when a deadline has passed.

        Both alternate if both are due, so that neither starves. If the process did not run for a
        while, the events that have arrived are handled first: an engine that has reported is not
        silent.
        """
        while True:
            now = time.monotonic()
            due = min(deadlines(self.state), default=now + _IDLE_S)
            wait = max(due, self._settled_at) - now
            if wait > 0:
                self._must_tick = False
            elif self._must_tick or not (self._ticked or self._events.empty()):
                self._ticked, self._must_tick = True, False
                return Tick()
            if not self._events.empty():
                self._ticked = False
                return self._events.get_nowait()
            wait = max(_SHORTEST_S, min(wait, _IDLE_S))
            event: Event | None = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    event = await self._events.get()
            is_late = time.monotonic() - now > wait + PAUSED_S
            begins_pause, self._was_late = is_late and not self._was_late, is_late
            if begins_pause and due > self._settled_at:
                self._settled_at = time.monotonic() + _SETTLED_S
            elif event is None:
                return Tick()
            elif is_late:
                self._must_tick = True
            if event is not None:
                return event
