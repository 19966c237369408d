"""The one owner of the loader's state: events go in, effects and replies come out. All of it runs on the event loop's thread."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from services.loader import status_publisher as telling
from services.loader.adapters.reclaim import GivingBack
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
    Forget,
    Freed,
    Grant,
    Hurry,
    OpenArena,
    Refused,
    Remember,
    StartRun,
    Vacate,
)
from services.loader.domain.events import Abandoned, Event
from services.loader.domain.state import Entry, Stage, State
from shared.contracts.base import Done, Message
from shared.contracts.loader import WeightsAttached, WeightsReleased
from shared.errors import from_body
from weights.pool.chunks import Chunks


class Loop:
    """`changed` is set whenever the state has; `moved` is another event after each change."""

    def __init__(
        self,
        boot_id: str,
        records: Records,
        workers: Callable[[Callable[[Event], None]], tuple[Runs, GivingBack]],
        chunks: Chunks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`workers`: what works in threads, given the way to tell of it."""
        self._loop = asyncio.get_running_loop()
        self._boot_id, self.records = boot_id, records
        self.state, self.clock = State(chunks=chunks), clock
        self.busy_at = clock()
        """When a load was under way last."""
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self.runs, self.giving_back = workers(self._from_thread)
        self.changed = asyncio.Event()
        self.moved = asyncio.Event()

    def number(self) -> int:
        """A new one, for a reply."""
        return next(self._numbers)

    async def ask(self, event: Callable[[int], Event]) -> Message:
        """The reply to an event, which is made with the reply's number. Raises the `ThawError` that it is refused with."""
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
            self.moved.set()
            self.moved = asyncio.Event()

    def _from_thread(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self.dispatch, event)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartRun():
                self.runs.start(effect)
            case CancelRun():
                self.runs.cancel(effect.run)
            case Hurry():
                self.runs.hurry(effect.run)
            case Grant():
                self.runs.grant(effect.run, effect.chunks)
            case Deny():
                self.runs.grant(effect.run, None)
            case OpenArena():
                assert self.runs.copies is not None
                self.runs.copies.open(effect)
            case CloseArena():
                assert self.runs.copies is not None
                self.runs.copies.close(effect)
            case Forget():
                self.records.remove(effect.weights_id)
            case Vacate():
                self.giving_back.start(effect, self.runs.forget(effect.run))
            case Remember():
                entry = self.state.entries[effect.weights_id]
                if entry.stage is Stage.CACHED:
                    self.runs.past(entry.run)
                self.records.write(telling.record(self.state, entry))
            case Accepted():
                self._answer(effect.reply, Done())
            case Attached():
                self._answer(effect.reply, self._attached(self.state.entries[effect.weights_id], effect.device))
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

    def _attached(self, e: Entry, device: str | None) -> WeightsAttached:
        timeline, copies = self.runs.timeline(e.run), self.runs.copies
        handle = copies.handle(e.run, device) if copies is not None and device is not None else None
        told = telling.attached(self.state, e, self.records.pool_name, timeline.spans() if timeline else ())
        return told.model_copy(update={"handle": handle, "boot_id": self._boot_id})
