"""One migration after the other: watch the bucket, claim, decide, perform effects.

The loop owns the work. Answers arrive as events; nothing else changes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Protocol

from nats.errors import Error as NatsError

from services.migrator.adapters.records import Copy, Held, Records
from services.migrator.adapters.telemetry import Metrics, MigrationSpan
from services.migrator.domain.decide import begin, deadline, decide, failed_unexpectedly, handed_over
from services.migrator.domain.events import Answered, Ask, Effect, Ended, Event, Forget, Link, Lost, Refused, Save, Tick
from services.migrator.domain.leases import Leases, find_claimable, next_look
from services.migrator.domain.speeds import LearnedSpeeds
from services.migrator.domain.work import Options, Work
from shared.contracts.base import Message
from shared.contracts.migration import MigrationRecord
from shared.errors import ThawError
from shared.tasks import end

log = logging.getLogger(__name__)
_LONGEST_S = 5.0
_LAST_WRITE_S = 2.0


class Conversations(Protocol):
    """Requests to engines and gateways."""

    async def ask(self, ask: Ask) -> Message:
        """Return the answer. Raises `ThawError`."""

    async def forget(self, forget: Forget) -> None:
        """Drop prepared resume state; harmless without a subscriber."""


class Migrator:
    def __init__(self, records: Records, conversations: Conversations, metrics: Metrics, options: Options) -> None:
        self._records = records
        self._talk = conversations
        self._metrics = metrics
        self._options = options
        self._leases = Leases()
        self.copy = Copy(self._leases, self._on_changed)
        self._learned = LearnedSpeeds()
        self._looked = asyncio.Event()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._held: Held | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._forgetting: set[asyncio.Task[None]] = set()

    def _on_changed(self, record: MigrationRecord | None, migration_id: str) -> None:
        """Handle a change of the bucket."""
        self._looked.set()
        if self._held is not None and self._held.migration_id == migration_id:
            if record is None or record.state == "cancelled":
                self._events.put_nowait(Lost(over=True))
            elif record.owner != self._records.owner and not record.over and not self._held.is_newer_than(record):
                self._events.put_nowait(Lost())

    async def run(self) -> None:
        """Run until cancelled; then hand over the current migration."""
        try:
            while True:
                claimed = await self._claim()
                if claimed is not None:
                    await self._migrate(*claimed)
        finally:
            if self._forgetting:
                await asyncio.wait(self._forgetting, timeout=_LAST_WRITE_S)

    async def _claim(self) -> tuple[MigrationRecord, Held] | None:
        """Return the next unclaimed migration; waits for one."""
        now = time.monotonic()
        self._looked.clear()
        wanted = find_claimable(self._leases, now)
        if wanted is None:
            look = next_look(self._leases, now)
            wait = min(look - now, _LONGEST_S) if look is not None else _LONGEST_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._looked.wait(), max(0.005, wait + 0.005))
            return None
        try:
            claimed = await self._records.claim(wanted, lambda over: self._events.put_nowait(Lost(over)))
        except (NatsError, TimeoutError) as e:
            log.info("failed to claim a migration; retrying", extra={"error": repr(e)})
            self._leases.refuse(wanted, now, away=True)
            return None
        if claimed is None:
            self._leases.refuse(wanted, now)
        return claimed

    async def _migrate(self, record: MigrationRecord, held: Held) -> None:
        span = MigrationSpan(record)
        self._held, self._events = held, asyncio.Queue()
        writing = asyncio.create_task(held.run(), name="write record")
        log.info(
            "migration started", extra={"migration_id": record.migration_id, "from": record.source_instance, "to": record.node}
        )
        claimed = record.model_copy(update={"traceparent": span.traceparent})
        speed, link = self._learned.recompute(record), self._learned.link(record)
        work, effects = begin(claimed, self._records.owner, speed, self._options, time.monotonic(), link)
        ended = None
        try:
            while ended is None:
                for effect in effects:
                    ended = self._carry_out(effect, held, span) or ended
                if ended is None:
                    work, effects = decide(work, await self._wait_for_event(work), time.monotonic())
            if not ended.lost and not await held.wait_until_written():
                ended = replace(ended, lost=True)
        except asyncio.CancelledError:
            await self._hand_over(work, held)
            raise
        except Exception as e:  # a process boundary: the next migrator would fail in the same way
            log.exception("failed to decide a migration; it ends", extra={"migration_id": record.migration_id})
            work = replace(work, record=failed_unexpectedly(work, e))
            held.save(work.record)
            ended = Ended(work.record, lost=not await held.wait_until_written())
        finally:
            self._held = None
            await end(writing, *self._tasks)
            span.end(work.record, lost=ended is None or ended.lost)
        self._on_ended(ended, work)

    def _on_ended(self, ended: Ended, work: Work) -> None:
        self._learned.keep(work.record, work.speed, work.link)
        fields = {"migration_id": ended.record.migration_id, "state": "lost" if ended.lost else ended.record.state}
        if not ended.lost:
            self._leases.forget(ended.record.migration_id)
            self._metrics.record(ended.record)
            fields["error"] = ended.record.error.message if ended.record.error else ""
        log.info("migration ended", extra=fields)

    async def _hand_over(self, work: Work, held: Held) -> None:
        """Release the lease, so that another migrator need not wait until it expires."""
        if work.ended:
            return
        held.save(handed_over(work))
        try:
            await asyncio.wait_for(held.wait_until_written(), _LAST_WRITE_S)
        except TimeoutError:
            log.info("failed to hand over a migration; its lease will expire", extra={"migration_id": held.migration_id})

    async def _wait_for_event(self, work: Work) -> Event:
        if not self._events.empty():
            return self._events.get_nowait()
        try:
            return await asyncio.wait_for(self._events.get(), max(0.001, deadline(work) - time.monotonic()))
        except TimeoutError:
            return Tick()

    def _carry_out(self, effect: Effect, held: Held, span: MigrationSpan) -> Ended | None:
        match effect:
            case Save(record):
                held.save(record)
            case Ask():
                with span.current():
                    self._spawn(self._ask(effect), effect.key, self._tasks)
            case Forget():
                with span.current():
                    self._spawn(self._talk.forget(effect), "forget", self._forgetting)
            case Link(parent):
                span.link(parent)
            case Ended():
                return effect
        return None

    async def _ask(self, ask: Ask) -> None:
        try:
            reply = await self._talk.ask(ask)
        except ThawError as e:
            self._events.put_nowait(Refused(ask.key, e.body()))
        except Exception as e:  # a process boundary: every question needs an answer
            log.exception("request failed unexpectedly", extra={"key": ask.key})
            self._events.put_nowait(Refused(ask.key, ThawError(f"{type(e).__name__}: {e}").body()))
        else:
            self._events.put_nowait(Answered(ask.key, reply))

    @staticmethod
    def _spawn(coroutine: Coroutine[Any, Any, None], name: str, among: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(coroutine, name=name)
        among.add(task)
        task.add_done_callback(among.discard)
