"""Changes of API keys in their JetStream bucket, each preceded by an entry of the audit log.

Every change of an entry names the revision that it replaces, whose value must be the one that the
change was made from. So a change on one gateway can neither make a key valid again that another
gateway has revoked, nor undo another gateway's change. Changes of one key on one gateway follow
each other. NATS acknowledges a write after it is on the disk (docs/adr/0048).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NoStreamResponseError, NotFoundError
from nats.js.kv import KeyValue
from pydantic import ValidationError

from services.gateway.adapters.key_store import KeyStore, parse_key
from shared.contracts import subjects
from shared.contracts.keys import MAX_OVERLAP_S, ApiKey, ChangeKey, KeyChanged, KeyLimits, NewKey, RotateKey
from shared.errors import Conflict, NotFound, StoreFull, ThawError, Unavailable
from shared.messaging import Mesh
from shared.messaging.buckets import create_entry, delete_entry
from shared.messaging.full_stores import full_as
from shared.messaging.streams import ensure_audit_stream, keys_bucket

log = logging.getLogger(__name__)
_FULL = "The store of API keys is full (16 MiB). Revoke unused keys with `thaw keys revoke NAME`."
_TIMEOUT_S = 3
_RETRY_S = 0.05
_LIMITS = tuple(KeyLimits.model_fields)
MAX_LOG_ENTRIES = 1000
Action = Literal["add", "change", "rotate", "revoke", "failed"]


@dataclass(frozen=True, slots=True)
class Actor:
    """The author of a change of a key: the name of an admin key, and the client's address."""

    name: str
    address: str = ""


@contextmanager
def _store_errors_as_unavailable() -> Iterator[None]:
    try:
        yield
    except (NatsError, TimeoutError) as e:
        raise Unavailable(
            f"The store of API keys cannot be reached ({type(e).__name__}). Repeat the request", should_retry=True
        ) from e


async def _is_current() -> bool:
    """The copy of a bucket to which no other gateway writes."""
    return True


def limits_of(key: NewKey | ApiKey) -> dict[str, Any]:
    """Return the fields of a key that limit its use."""
    return {name: getattr(key, name) for name in _LIMITS}


class KeyWriter:
    """Write keys and the audit log. The store's copy has a change before its reply."""

    def __init__(self, mesh: Mesh, store: KeyStore, catch_up: Callable[[], Awaitable[bool]] = _is_current) -> None:
        """Create a writer.

        Args:
            mesh: The connection to NATS.
            store: The copy of the bucket.
            catch_up: Lets the copy catch up with what is in the bucket; False: it did not in time.
        """
        self._catch_up = catch_up
        self._mesh = mesh
        self._store = store
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def add(self, new: NewKey, actor: Actor) -> ApiKey:
        """Add a key. Raises `Conflict` if its name or its hash exists already."""
        async with self._lock(new.name):
            return await self._add(new, actor)

    async def _add(self, new: NewKey, actor: Actor) -> ApiKey:
        self._refuse_present(new.name)
        key = ApiKey(name=new.name, scope=new.scope, created=int(time.time()), **limits_of(new))
        async with self._audited("add", key.name, actor, key.model_dump(mode="json", exclude_defaults=True)) as bucket:
            await self._create_named(bucket, new.sha256, key)
        return key

    def _refuse_present(self, name: str) -> None:
        if self._store.find_named(name):
            raise Conflict(f"An API key called {name} exists already. Revoke it, or choose another name", param="name")

    async def put(self, new: NewKey, actor: Actor) -> ApiKey:
        """Make the key exist as described, as a file of keys does.

        A key of that name keeps its time of creation. If it has another hash, the present one is
        revoked.
        """
        async with self._lock(new.name):
            return await self._put(new, actor)

    async def _put(self, new: NewKey, actor: Actor) -> ApiKey:
        present = self._store.find_named(new.name)
        if not present:
            return await self._add(new, actor)
        now = present.get(new.sha256)
        created = min(key.created for key in present.values())
        key = ApiKey(name=new.name, scope=new.scope, created=created, **limits_of(new))
        if now == key and len(present) == 1:
            return key
        action: Action = "change" if now is not None else "rotate"
        async with self._audited(action, key.name, actor, key.model_dump(mode="json", exclude_defaults=True)) as bucket:
            if now is not None:
                await self._update(bucket, new.sha256, now, key)
            else:
                await self._create(bucket, new.sha256, key)
            for digest in present.keys() - {new.sha256}:
                await self._delete(bucket, digest)
        return key

    async def change(self, name: str, change: ChangeKey, actor: Actor) -> ApiKey:
        """Change the limits of a key; a new expiry does not prolong the overlap of a rotation.

        Raises:
            NotFound: There is no key of that name.
        """
        async with self._lock(name):
            return await self._change(name, change, actor)

    async def _change(self, name: str, change: ChangeKey, actor: Actor) -> ApiKey:
        present = self._find(name)
        fields = {field: getattr(change, field) for field in change.model_fields_set}
        # The key that is being replaced first: at no time it expires after its successor.
        digests = sorted(present, key=lambda d: _rank(present[d]))
        async with self._audited("change", name, actor, change.model_dump(mode="json", exclude_unset=True)) as bucket:
            for digest in digests:
                key, more = present[digest], dict(fields)
                if "expires" in fields and digest != digests[-1]:
                    more["expires"] = _earlier(key.expires, fields["expires"])
                await self._update(bucket, digest, key, key.model_copy(update=more))
        return self._find_newest(name)

    async def rotate(self, name: str, rotation: RotateKey, actor: Actor) -> ApiKey:
        """Add a new key of the same name and limits; the old one expires after the overlap.

        Raises:
            NotFound: There is no key of that name.
            Conflict: The new key exists already, or the key is being rotated.
        """
        async with self._lock(name):
            return await self._rotate(name, rotation, actor)

    async def _rotate(self, name: str, rotation: RotateKey, actor: Actor) -> ApiKey:
        present = self._find(name)
        now = int(time.time())
        newest = max(present.values(), key=_rank)
        # More than one if an earlier rotation was interrupted. This one completes it.
        in_use = {d: key for d, key in present.items() if key is newest or _outlasts_rotation(key, newest)}
        replaced = {d: key for d, key in present.items() if d not in in_use}
        if any(key.expires is None or key.expires > now for key in replaced.values()):
            raise Conflict(f"The API key {name} is being rotated: its old key is still valid. Repeat the request later")
        is_repeated = len(in_use) > 1 and in_use.pop(rotation.sha256, None) is not None
        until = now + rotation.overlap_s
        async with self._audited("rotate", name, actor, {"overlap_s": rotation.overlap_s}) as bucket:
            for expired in replaced:
                await self._delete(bucket, expired)
            if not is_repeated:
                await self._create(bucket, rotation.sha256, newest.model_copy(update={"created": now}))
            try:
                for digest, old in in_use.items():
                    await self._update(bucket, digest, old, old.model_copy(update={"expires": _earlier(until, old.expires)}))
            except (NotFound, Conflict):  # it was revoked or changed meanwhile: so must its successor be
                await self._delete(bucket, rotation.sha256)
                raise
            if rotation.overlap_s == 0:
                for digest in in_use:
                    await self._delete(bucket, digest)
        return self._find_newest(name)

    async def revoke(self, name: str, actor: Actor) -> ApiKey:
        """Revoke a key. Raises `NotFound` if there is none of that name."""
        async with self._lock(name):
            return await self._revoke(name, actor)

    async def _revoke(self, name: str, actor: Actor) -> ApiKey:
        present = self._find(name)
        newest = self._find_newest(name)
        async with self._audited("revoke", name, actor, {}, is_required=False) as bucket:
            for digest in present:
                await self._delete(bucket, digest)
        return newest

    async def read_log(self, limit: int) -> tuple[KeyChanged, ...]:
        """Return the latest entries of the audit log, the latest first.

        Raises:
            Unavailable: NATS does not answer.
        """
        found: list[KeyChanged] = []
        with _store_errors_as_unavailable():
            js = self._mesh.nc.jetstream(timeout=_TIMEOUT_S)
            try:
                last = (await js.stream_info(subjects.AUDIT_STREAM)).state
            except NotFoundError:
                return ()
            for sequence in range(last.last_seq, max(last.first_seq, last.last_seq - limit + 1) - 1, -1):
                try:
                    message = await js.get_msg(subjects.AUDIT_STREAM, sequence)
                    found.append(KeyChanged.model_validate_json(message.data or b""))
                except (NotFoundError, ValidationError):
                    continue  # removed by the stream's limits, or written by a newer version
        return tuple(found)

    # Writes.

    def _lock(self, name: str) -> asyncio.Lock:
        """Return the lock of a key's changes, which exists while one is in progress."""
        return self._locks.setdefault(name, asyncio.Lock())

    @asynccontextmanager
    async def _audited(
        self, action: Action, name: str, actor: Actor, details: dict[str, Any], *, is_required: bool = True
    ) -> AsyncIterator[KeyValue]:
        """Write the audit entry, and open the bucket for the change inside the block.

        Args:
            is_required: Without the entry the change is refused. A revocation is made in any case.
        """
        with _store_errors_as_unavailable():
            bucket = await keys_bucket(self._mesh.nc.jetstream(timeout=_TIMEOUT_S), self._mesh.replicas)
            try:
                await self._log(action, name, actor, details)
            except (NatsError, TimeoutError) as e:
                if is_required:
                    raise
                log.error("failed to write the audit log of a revocation", extra={"name_of_key": name, "error": repr(e)})
            try:
                yield bucket
            except (ThawError, NatsError, TimeoutError) as e:
                try:
                    await self._log("failed", name, actor, {"action": action, "error": str(e)})
                except (NatsError, TimeoutError) as fault:
                    log.error("failed to write the audit log", extra={"name_of_key": name, "error": repr(fault)})
                raise

    async def _log(self, action: Action, name: str, actor: Actor, details: dict[str, Any]) -> None:
        js = self._mesh.nc.jetstream(timeout=_TIMEOUT_S)
        entry = KeyChanged(at=time.time(), actor=actor.name, address=actor.address, action=action, key=name, details=details)
        await ensure_audit_stream(js, self._mesh.replicas)
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                await js.publish(subjects.AUDIT_KEYS, entry.model_dump_json().encode())
                return
            except NoStreamResponseError:  # a replicated stream has no leader at first, nor after its server has died
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _mark(self, bucket: KeyValue, key: ApiKey) -> None:
        async def write(entry: str) -> None:
            await bucket.put(entry, b"1")

        await self._store.mark(key.scope, write)

    async def _create(self, bucket: KeyValue, digest: str, key: ApiKey) -> None:
        value = key.model_dump_json().encode()
        try:
            with full_as(_FULL):
                await self._mark(bucket, key)
                revision = await bucket.create(digest, value)
        except KeyWrongLastSequenceError as e:
            raise _existing_key() from e
        self._store.on_written(digest, value, revision)

    async def _create_named(self, bucket: KeyValue, digest: str, key: ApiKey) -> None:
        """Create the only record of a name.

        It is written only if the bucket has not changed since the copy was seen to lack the name:
        another gateway may add the name at the same time.

        Raises:
            Conflict: The name or the key exists already.
            Unavailable: The copy of the bucket is late, or the bucket changes all the time.
        """
        js, value = self._mesh.nc.jetstream(timeout=_TIMEOUT_S), key.model_dump_json().encode()
        with full_as(_FULL):
            await self._mark(bucket, key)
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            last = (await bucket.status()).stream_info.state.last_seq
            if not await self._catch_up():
                break
            self._refuse_present(key.name)
            if self._store.find(digest) is not None:
                raise _existing_key()
            with contextlib.suppress(KeyNotFoundError):  # a record that the copy cannot parse
                await bucket.get(digest)
                raise _existing_key()
            try:
                with full_as(_FULL):
                    revision = await create_entry(js, subjects.KEYS_BUCKET, digest, value, last)
            except KeyWrongLastSequenceError:
                continue
            self._store.on_written(digest, value, revision)
            return
        raise Unavailable("The store of API keys was changed meanwhile. Repeat the request", should_retry=True)

    async def _update(self, bucket: KeyValue, digest: str, before: ApiKey, key: ApiKey) -> None:
        """Replace the record `before` of a key.

        Raises:
            NotFound: The key was revoked meanwhile.
            Conflict: The record was changed meanwhile.
        """
        value = key.model_dump_json().encode()
        changed = Conflict(f"The API key {key.name} was changed meanwhile. Repeat the request", should_retry=True)
        try:
            entry = await bucket.get(digest)
            if parse_key(entry.value or b"") != before:
                raise changed
            with full_as(_FULL):
                revision = await bucket.update(digest, value, last=entry.revision)
        except KeyNotFoundError as e:
            raise NotFound(f"The API key {key.name} was revoked meanwhile") from e
        except KeyWrongLastSequenceError as e:
            raise changed from e
        self._store.on_written(digest, value, revision)

    async def _delete(self, bucket: KeyValue, digest: str) -> None:
        key = self._store.find(digest)
        if key is None:
            return
        try:
            await self._mark(bucket, key)
        except (NatsError, StoreFull) as e:  # a full bucket must not keep a key valid; the file has the marker
            log.warning("failed to write the marker of API keys", extra={"error": repr(e)})
        revision = await delete_entry(self._mesh.nc.jetstream(timeout=_TIMEOUT_S), subjects.KEYS_BUCKET, digest)
        self._store.on_written(digest, None, revision)

    def _find(self, name: str) -> dict[str, ApiKey]:
        found = self._store.find_named(name)
        if not found:
            raise NotFound(f"No API key is called {name}. `thaw keys list` shows the keys", param="name")
        return found

    def _find_newest(self, name: str) -> ApiKey:
        return max(self._find(name).values(), key=_rank)


def _existing_key() -> Conflict:
    return Conflict("This API key exists already under another name. Create a new key", param="sha256")


def _earlier(*times: int | None) -> int | None:
    """Return the first of some expiries; None is never."""
    return min((time for time in times if time is not None), default=None)


def _outlasts_rotation(key: ApiKey, newest: ApiKey) -> bool:
    """Return whether a key expires later than a whole rotation leaves it."""
    return key.expires is None or key.expires > newest.created + MAX_OVERLAP_S


def _rank(key: ApiKey) -> tuple[float, int]:
    """Order the keys of one name: the present one is the largest."""
    return math.inf if key.expires is None else key.expires, key.created
