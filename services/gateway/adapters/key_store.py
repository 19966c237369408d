"""API keys that operators add and revoke: hashes in a JetStream bucket.

The bucket also records for each scope that a key has existed, and so does a file of the gateway
(`KeyMarker`): an endpoint that had keys does not open when the last one is revoked or lost. See
docs/adr/0048.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import ValidationError

from services.gateway.adapters.key_marker import KeyMarker
from shared.contracts.keys import ApiKey, Scope
from shared.errors import Conflict, NotFound, Unavailable
from shared.messaging import Mesh
from shared.messaging.full_stores import full_as
from shared.messaging.streams import keys_bucket

log = logging.getLogger(__name__)
_FULL = "The store of API keys is full (16 MiB). Revoke unused keys with `thaw keys revoke NAME`."
_SCOPES: tuple[Scope, ...] = ("inference", "admin")
_MARKERS: dict[str, Scope] = {f"existed.{scope}": scope for scope in _SCOPES}
"""Entries of the bucket that are not keys; a gateway of an older version logs and skips them."""


@contextmanager
def _store_errors_as_unavailable() -> Iterator[None]:
    try:
        yield
    except (NatsError, TimeoutError) as e:
        raise Unavailable(
            f"The store of API keys cannot be reached ({type(e).__name__}). Repeat the request", should_retry=True
        ) from e


class KeyStore:
    """A copy of the bucket, and its writer.

    An entry that cannot be parsed may be a key of any scope: it counts as an existing key of each
    scope, and grants nothing.

    Attributes:
        complete: The bucket has been read; no request can be authorized before.
    """

    def __init__(self, mesh: Mesh, marker: KeyMarker) -> None:
        self._mesh = mesh
        self._marker = marker
        self._keys: dict[str, ApiKey] = {}
        self._unparsable: set[str] = set()
        self._scopes: dict[Scope, frozenset[str]] = {}
        self._existed: set[Scope] = set(marker.read())
        self._in_bucket: set[Scope] = set()
        self._in_file: set[Scope] = set(self._existed)
        self._writing: asyncio.Task[None] | None = None
        self.complete = False

    def hashes(self, scope: Scope) -> frozenset[str]:
        """Return the hashes of the valid keys of a scope."""
        return self._scopes.get(scope, frozenset())

    def has_existed(self, scope: Scope) -> bool:
        """True if a key of the scope exists or has existed."""
        return scope in self._existed

    @property
    def has_unparsable(self) -> bool:
        """True if the bucket has entries that cannot be parsed and may be keys."""
        return bool(self._unparsable)

    def list_keys(self) -> list[ApiKey]:
        return sorted(self._keys.values(), key=lambda k: (k.name, k.created))

    # The copy.

    def replace(self, entries: dict[str, bytes]) -> None:
        self._keys, self._unparsable, self._in_bucket = {}, set(), set()
        for key, value in entries.items():
            self._take(key, value)
        self._index()
        self.complete = True

    def put(self, key: str, value: bytes) -> None:
        self._take(key, value)
        self._index()

    def remove(self, key: str) -> None:
        self._keys.pop(key, None)
        self._unparsable.discard(key)
        if scope := _MARKERS.get(key):
            self._in_bucket.discard(scope)
        self._index()

    def _take(self, key: str, value: bytes) -> None:
        if scope := _MARKERS.get(key):
            self._in_bucket.add(scope)
            self._existed.add(scope)
            return
        self._keys.pop(key, None)
        parsed = _parse(value)
        if parsed is None:
            self._unparsable.add(key)
            self._existed.update(_SCOPES)
            return
        self._unparsable.discard(key)
        self._keys[key] = parsed
        self._existed.add(parsed.scope)

    def _index(self) -> None:
        scopes: dict[Scope, set[str]] = {"inference": set(), "admin": set()}
        for digest, key in self._keys.items():
            scopes[key.scope].add(digest)
        self._scopes = {scope: frozenset(digests) for scope, digests in scopes.items()}
        if not self._existed <= self._in_file:
            self._write_marker()

    def note(self, scope: Scope) -> None:
        """Record that a key of the scope has existed, as one in the gateway's settings."""
        self._existed.add(scope)
        if not self._existed <= self._in_file:
            self._write_marker()

    def _write_marker(self) -> None:
        scopes = frozenset(self._existed)
        self._in_file |= scopes
        self._writing = asyncio.create_task(self._write(scopes, self._writing), name="API key marker")

    async def _write(self, scopes: frozenset[Scope], previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await previous
        await asyncio.to_thread(self._marker.write, scopes)

    async def _mark(self, bucket: KeyValue, scope: Scope) -> None:
        """Record the scope in the bucket and the file, before a key is added or revoked."""
        self.note(scope)
        if scope not in self._in_bucket:
            await bucket.put(f"existed.{scope}", b"1")
            self._in_bucket.add(scope)
        if self._writing is not None:
            await self._writing

    # The writer.

    async def add(self, digest: str, key: ApiKey) -> None:
        """Add a key. Raises `Conflict` if its name or its hash exists already."""
        if any(k.name == key.name for k in self._keys.values()):
            raise Conflict(f"An API key called {key.name} exists already. Revoke it, or choose another name", param="name")
        value = key.model_dump_json().encode()
        with _store_errors_as_unavailable():
            bucket = await keys_bucket(self._mesh.nc.jetstream(timeout=3), self._mesh.replicas)
            try:
                with full_as(_FULL):
                    await self._mark(bucket, key.scope)
                    await bucket.create(digest, value)
            except KeyWrongLastSequenceError as e:
                raise Conflict("This API key exists already under another name. Create a new key", param="sha256") from e
        self.put(digest, value)

    async def revoke(self, name: str) -> ApiKey:
        """Revoke a key. Raises `NotFound` if there is none of that name."""
        matches = [(digest, key) for digest, key in self._keys.items() if key.name == name]
        if not matches:
            raise NotFound(f"No API key is called {name}. `thaw keys list` shows the keys", param="name")
        with _store_errors_as_unavailable():
            bucket = await keys_bucket(self._mesh.nc.jetstream(timeout=3), self._mesh.replicas)
            for digest, key in matches:
                try:
                    await self._mark(bucket, key.scope)
                except NatsError as e:  # a full bucket must not keep a key valid; the file has the marker
                    log.warning("failed to write the marker of API keys", extra={"error": repr(e)})
                try:
                    await bucket.delete(digest)
                except KeyNotFoundError:
                    log.info("API key was revoked by another gateway already", extra={"name_of_key": name})
                self.remove(digest)
        return matches[0][1]


def _parse(value: bytes) -> ApiKey | None:
    try:
        return ApiKey.model_validate_json(value)
    except ValidationError as e:
        log.warning("failed to parse an API key", extra={"faults": e.error_count()})
        return None
