"""Watch and write the bucket of migrations.

All migrators watch it; the holder of a lease writes it with compare-and-set.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import ValidationError

from services.migrator.domain.leases import Leases
from services.migrator.domain.record_size import fit_record, refuse_record
from shared.contracts.migration import MigrationRecord
from shared.messaging import Mesh
from shared.messaging.streams import migrations_bucket

log = logging.getLogger(__name__)
_AGAIN_S = 0.2


def parse(value: bytes) -> MigrationRecord | None:
    try:
        return MigrationRecord.model_validate_json(value)
    except ValidationError as e:
        log.warning("dropped a malformed migration", extra={"error": str(e)})
        return None


class Copy:
    """Mirrors the bucket in `leases` and calls `changed`.

    The watch of one's own writes renews only one's own lease.
    """

    def __init__(self, leases: Leases, changed: Callable[[MigrationRecord | None, str], None]) -> None:
        self._leases = leases
        self._changed = changed

    def replace(self, entries: dict[str, bytes]) -> None:
        records = [r for value in entries.values() if (r := parse(value)) is not None]
        gone = self._leases.watched.keys() - {r.migration_id for r in records}
        self._leases.replace(records, time.monotonic())
        for record in records:
            self._changed(record, record.migration_id)
        for migration_id in gone:
            self._changed(None, migration_id)

    def put(self, key: str, value: bytes) -> None:
        if (record := parse(value)) is not None:
            self._leases.record_seen(record, time.monotonic())
            self._changed(record, key)

    def remove(self, key: str) -> None:
        self._leases.forget(key)
        self._changed(None, key)


class Held:
    """A record whose lease this process holds.

    Writes the newest version given, one after the other.
    """

    def __init__(
        self, bucket: KeyValue, record: MigrationRecord, revision: int, lost: Callable[[bool], None], max_bytes: int
    ) -> None:
        """Hold a record.

        Args:
            bucket: Where it is written.
            record: As claimed.
            revision: Of the claim.
            lost: Called when the lease is lost; True: the migration is over.
            max_bytes: Largest record that NATS accepts. Of a larger one, details are left out.
        """
        self._bucket = bucket
        self._max_bytes = max_bytes
        self._record = record
        self._revision = revision
        self._lost = lost
        self._newest: MigrationRecord | None = None
        self._given = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()
        self._has_ended = False
        self._is_shortened = False

    @property
    def migration_id(self) -> str:
        return self._record.migration_id

    def is_newer_than(self, record: MigrationRecord) -> bool:
        """True if `record` is older than this process's claim: a read of the bucket may be late."""
        return record.beats < self._record.beats

    def save(self, record: MigrationRecord) -> None:
        """Have `record` written, unless the lease is lost."""
        if not self._has_ended:
            self._newest = record
            self._written.clear()
            self._given.set()

    async def wait_until_written(self) -> bool:
        """Return True when everything given so far is in the bucket, False if the lease is lost."""
        await self._written.wait()
        return not self._has_ended

    async def run(self) -> None:
        """Write until cancelled or the lease is lost. Retries while NATS is unreachable."""
        try:
            await self._write_newest()
        finally:
            self._has_ended = True
            self._written.set()

    async def _write_newest(self) -> None:
        while True:
            await self._given.wait()
            self._given.clear()
            record = self._newest
            if record is None:
                continue
            try:
                if not await self._write(record):
                    return
            except (NatsError, TimeoutError) as e:
                log.info(
                    "failed to write a migration record; retrying", extra={"error": repr(e), "migration_id": self.migration_id}
                )
                await asyncio.sleep(_AGAIN_S)
                self._given.set()
                continue
            if self._newest is record:
                self._written.set()

    async def _write(self, record: MigrationRecord) -> bool:
        """Write a record; return False if the lease is lost or given up.

        A record that is too large without its details, too, ends the migration: no later version of
        it, and none of another owner, would be smaller.
        """
        fitting = fit_record(record, self._max_bytes)
        if fitting is None:
            refused = refuse_record(record, self._max_bytes)
            if await self._put(refused):
                log.error(
                    "failed to store a migration; it ends", extra={"migration_id": self.migration_id, "bytes": self._max_bytes}
                )
                self._lost(True)
            return False
        if fitting is not record and not self._is_shortened:
            self._is_shortened = True
            log.warning("a migration record is too large for NATS: details are left out", extra={"migration_id": self.migration_id})
        return await self._put(fitting)

    async def _put(self, record: MigrationRecord) -> bool:
        value = record.model_dump_json().encode()
        try:
            self._revision = await self._bucket.update(record.migration_id, value, last=self._revision)
        except KeyWrongLastSequenceError:
            # A write whose confirmation was lost is still this owner's.
            there, revision = await _get(self._bucket, record.migration_id)
            if there is None or there.owner != self._record.owner or there.over:
                self._lost(there is None or there.over)
                return False
            self._revision = await self._bucket.update(record.migration_id, value, last=revision)
        return True


class Records:
    def __init__(self, mesh: Mesh, owner: str) -> None:
        self._mesh = mesh
        self.owner = owner

    async def claim(self, seen: MigrationRecord, lost: Callable[[bool], None]) -> tuple[MigrationRecord, Held] | None:
        """Become the owner of a record; None if it is no longer as `seen`.

        Raises NATS errors.
        """
        bucket = await migrations_bucket(self._mesh.nc.jetstream(timeout=2), self._mesh.replicas)
        there, revision = await _get(bucket, seen.migration_id)
        if there != seen or there is None:
            return None
        mine = there.model_copy(update={"owner": self.owner, "beats": there.beats + 1})
        try:
            revision = await bucket.update(seen.migration_id, mine.model_dump_json().encode(), last=revision)
        except KeyWrongLastSequenceError:
            return None
        return mine, Held(bucket, mine, revision, lost, self._mesh.max_body)


async def _get(bucket: KeyValue, key: str) -> tuple[MigrationRecord | None, int]:
    try:
        entry = await bucket.get(key)
    except KeyNotFoundError:
        return None, 0
    return (parse(entry.value) if entry.value else None), entry.revision or 0
