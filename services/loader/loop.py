"""The owner of the loader's state: events in, effects and replies out.

Runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from services.loader import status_publisher
from services.loader.adapters.reclaim import Reclaimer
from services.loader.adapters.records import Records
from services.loader.adapters.runs import Runs
from services.loader.domain.decide import decide
from services.loader.domain.effects import (
    Accepted,
    Attached,
    CancelRun,
    CloseArena,
    Deny,
    Effect,
    Freed,
    Grant,
    OpenArena,
    RaisePriority,
    Refused,
    RemoveRecord,
    StartRun,
    Vacate,
    WriteRecord,
)
from services.loader.domain.events import Abandoned, Event
from services.loader.domain.state import Stage, State
from shared.contracts.base import Done, Message
from shared.contracts.loader import WeightsAttached, WeightsReleased
from shared.errors import from_body
from weights.pool.chunks import Chunks


class Loop:
    """The loader's loop, which owns the state.

    Attributes:
        changed: Event, set on every change of the state.
        next_change: Event, replaced by a new one after each change.
    """

    def __init__(
        self,
        boot_id: str,
        records: Records,
        workers: Callable[[Callable[[Event], None]], tuple[Runs, Reclaimer]],
        chunks: Chunks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without weights.

        Args:
            boot_id: The identity of this process.
            records: Stores the state for the next process.
            workers: Creates the threads, which pass their events to the given function.
            chunks: The pool's chunks.
            clock: Monotonic seconds.
        """
        self._loop = asyncio.get_running_loop()
        self._boot_id, self.records = boot_id, records
        self.state, self.clock = State(chunks=chunks), clock
        self.busy_at = clock()
        """Monotonic seconds of the last moment with a load in progress."""
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self.runs, self.reclaimer = workers(self._from_thread)
        self.changed = asyncio.Event()
        self.next_change = asyncio.Event()

    def number(self) -> int:
        """Return a new number for a reply."""
        return next(self._numbers)

    async def ask(self, event: Callable[[int], Event]) -> Message:
        """Dispatch the event made with a reply's number, and return the reply.

        Raises the `ThawError` that refuses it.
        """
        number = self.number()
        reply: asyncio.Future[Message] = self._loop.create_future()
        self._replies[number] = reply
        try:
            self.dispatch(event(number))
            return await reply
        finally:
            del self._replies[number]
            if reply.cancelled():
                self.dispatch(Abandoned(number))

    def dispatch(self, event: Event) -> None:
        before = self.state
        self.state, effects = decide(before, event, self.clock())
        if before.is_loading or self.state.is_loading:
            self.busy_at = self.clock()
        for effect in effects:
            self._perform(effect)
        if self.state is not before:
            self.changed.set()
            self.next_change.set()
            self.next_change = asyncio.Event()

    def _from_thread(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self.dispatch, event)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartRun():
                self.runs.start(effect)
            case CancelRun():
                self.runs.cancel(effect.run)
            case RaisePriority():
                self.runs.raise_priority(effect.run)
            case Grant():
                self.runs.grant(effect.run, effect.chunks, effect.device)
            case Deny():
                self.runs.grant(effect.run, None)
            case OpenArena():
                assert self.runs.copies is not None
                self.runs.copies.open(effect)
            case CloseArena():
                assert self.runs.copies is not None
                self.runs.copies.close(effect)
            case RemoveRecord():
                self.records.remove(effect.weights_id)
            case Vacate():
                self.reclaimer.start(effect, self.runs.remove(effect.run))
            case WriteRecord():
                entry = self.state.entries[effect.key]
                if entry.stage is Stage.CACHED:
                    self.runs.mark_reused(entry.run)
                if entry.device is None:  # the next loader finds no whole weights in the others
                    self.records.write(status_publisher.record(self.state, entry))
            case Accepted():
                self._answer(effect.reply, Done())
            case Attached():
                self._answer(effect.reply, self._build_attached(effect))
            case Freed():
                self._answer(
                    effect.reply,
                    WeightsReleased(freed_bytes=effect.freed, cached_bytes=effect.cached, device_bytes=effect.on_devices),
                )
            case Refused():
                if (waiting := self._replies.get(effect.reply)) is not None and not waiting.done():
                    waiting.set_exception(from_body(effect.error))

    def _answer(self, number: int, message: Message) -> None:
        if (waiting := self._replies.get(number)) is not None and not waiting.done():
            waiting.set_result(message)

    def _build_attached(self, effect: Attached) -> WeightsAttached:
        e, device = self.state.entries[effect.key], effect.device
        timeline, copies = self.runs.timeline(e.run), self.runs.copies
        handle = copies.handle(e.run, device) if copies is not None and device is not None else None
        phases = timeline.spans() if timeline else ()
        if copies is not None and device is not None:
            phases += copies.phases(e.run, device, effect.instance_id)
        attached = status_publisher.build_attached(self.state, e, self.records.pool_name, phases)
        error = copies.error(e.run, device) if copies is not None and handle is None else None
        return attached.model_copy(update={"handle": handle, "device_error": error, "boot_id": self._boot_id})
