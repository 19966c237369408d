"""The leader's side of the migration bucket: orders, updates, and the search for a request's
engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import ValidationError

from services.scheduler.adapters import clock
from services.scheduler.domain.events import Event, MigrationUpdated
from shared.contracts import subjects
from shared.contracts.base import ErrorBody
from shared.contracts.migration import MIGRATION_KEPT_S, FindRequest, ListRequests, MigrationRecord, RequestFound, RequestsListed
from shared.errors import DeadlineExceeded, ThawError, Unreachable
from shared.messaging import Mesh
from shared.messaging.buckets import BucketWatcher
from shared.messaging.streams import migrations_bucket

log = logging.getLogger(__name__)
_LIST_MS = 1_000
_RETRY_S = 0.25


class Migrations:
    """The watcher's copy of the bucket.

    Args:
        mesh: The connection to NATS.
        post: Called with each change.
    """

    def __init__(self, mesh: Mesh, post: Callable[[Event], None]) -> None:
        self._mesh = mesh
        self._post = post
        self._records: dict[str, MigrationRecord] = {}
        self._changed_at: dict[str, float] = {}
        """Time of the last change of each record, in seconds of the loop's clock, the oldest first.
        """

    async def _open(self) -> KeyValue:
        return await migrations_bucket(self._mesh.nc.jetstream(timeout=2), self._mesh.replicas, owner=True)

    async def watch(self) -> None:
        """Watch the bucket until cancelled."""
        await BucketWatcher(self._mesh, partial(migrations_bucket, owner=True), self).run()

    def replace(self, entries: dict[str, bytes]) -> None:
        for key in self._records.keys() - entries.keys():
            self.remove(key)
        for key, value in entries.items():
            self.put(key, value)

    def put(self, key: str, value: bytes) -> None:
        try:
            record = MigrationRecord.model_validate_json(value)
        except ValidationError as e:
            log.warning("failed to parse a migration record", extra={"key": key, "error": str(e)})
            return
        if self._records.get(key) != record:
            now = clock.now()
            self._records[key] = record
            self._changed_at.pop(key, None)
            self._changed_at[key] = now
            self._post(MigrationUpdated(now, record))
            self._forget(now - MIGRATION_KEPT_S)

    def _forget(self, before: float) -> None:
        """Remove records that the bucket has expired; watchers get no event for that."""
        while (key := next(iter(self._changed_at))) and self._changed_at[key] < before:
            self.remove(key)

    def remove(self, key: str) -> None:
        self._changed_at.pop(key, None)
        record = self._records.pop(key, None)
        if record is not None and not record.over:
            self._post(MigrationUpdated(clock.now(), record.model_copy(update={"state": "cancelled"})))

    def list_latest(self, migration_id: str | None, limit: int) -> tuple[MigrationRecord, ...]:
        """Return the latest records first."""
        found = [r for r in self._records.values() if migration_id in (None, r.migration_id)]
        return tuple(sorted(found, key=lambda r: -r.created)[:limit])

    async def order(self, record: MigrationRecord) -> None:
        """Write a new record, with retries while JetStream does not answer."""
        while True:
            try:
                bucket = await self._open()
                await bucket.create(record.migration_id, record.model_dump_json().encode())
                return
            except KeyWrongLastSequenceError:
                return  # it is there: a confirmation was lost
            except (NatsError, TimeoutError) as e:
                log.warning(
                    "failed to write a migration order; retrying", extra={"migration_id": record.migration_id, "error": repr(e)}
                )
                await asyncio.sleep(_RETRY_S)

    async def call_off(self, record: MigrationRecord, error: ErrorBody) -> None:
        """Cancel an order that is still as in `record`.

        Without retries: when the bucket answers again, the order's owner writes its record first.
        """
        try:
            await self._cancel(record, error)
        except (KeyNotFoundError, KeyWrongLastSequenceError):
            pass  # it is gone, not written yet, or a migrator has just written it
        except (NatsError, TimeoutError) as e:
            log.warning("failed to cancel a migration", extra={"migration_id": record.migration_id, "error": repr(e)})

    async def _cancel(self, record: MigrationRecord, error: ErrorBody) -> None:
        bucket = await self._open()
        entry = await bucket.get(record.migration_id)
        if MigrationRecord.model_validate_json(entry.value or b"") != record:
            return
        cancelled = record.model_copy(update={"state": "cancelled", "error": error})
        await bucket.update(record.migration_id, cancelled.model_dump_json().encode(), last=entry.revision)

    async def find_request(self, request_id: str) -> RequestFound | None:
        """Return where the request with that client-side id is; None: no gateway has it."""
        try:
            return await self._mesh.request(
                subjects.FIND_REQUEST, FindRequest(request_id=request_id, deadline_ms=_LIST_MS), RequestFound
            )
        except (Unreachable, DeadlineExceeded):
            return None

    async def find(self, request_id: str, instances: Iterable[str]) -> str | None:
        """Return the instance that serves a request, by its id between gateways and engines."""

        async def serves(instance_id: str) -> str | None:
            try:
                asked = ListRequests(deadline_ms=_LIST_MS)
                listed = await self._mesh.request(subjects.engine_control(instance_id), asked, RequestsListed)
            except ThawError as e:
                log.info("failed to list the requests of an engine", extra={"instance_id": instance_id, "error": e.message})
                return None
            return instance_id if any(_is_attempt_at(r.request_id, request_id) for r in listed.requests) else None

        found = await asyncio.gather(*map(serves, instances))
        return next((i for i in found if i is not None), None)


def _is_attempt_at(attempt: str, request_id: str) -> bool:
    """True if `attempt` is an attempt at the request: gateways append a number to its id."""
    base, _, number = attempt.rpartition("-")
    return attempt == request_id or (base == request_id and number.isdigit())
