"""API keys that operators add and revoke: a copy of their JetStream bucket.

The bucket also records for each scope that a key has existed, and so does a file of the gateway
(`KeyMarker`): an endpoint that had keys does not open when the last one is revoked or lost. See
docs/adr/0048.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from services.gateway.adapters.key_marker import KeyMarker
from shared.contracts.keys import ApiKey, Scope
from shared.messaging.buckets import OwnWrites

log = logging.getLogger(__name__)
_SCOPES: tuple[Scope, ...] = ("inference", "admin")
"""Scopes of which a key closes routes that are open without one."""
_MARKERS: dict[str, Scope] = {f"existed.{scope}": scope for scope in _SCOPES}
"""Entries of the bucket that are not keys; a gateway of an older version logs and skips them."""


class KeyStore:
    """A copy of the bucket.

    An entry that cannot be parsed may be a key of any scope: it counts as an existing key of each
    scope, and grants nothing.

    Attributes:
        complete: The bucket has been read; no request can be authorized before.
        own_writes: Changes of this gateway, for the bucket's watcher.
        on_removed: Called with the hash of each key that is no longer valid.
    """

    def __init__(self, marker: KeyMarker) -> None:
        self._marker = marker
        self._keys: dict[str, ApiKey] = {}
        self._unparsable: set[str] = set()
        self._scopes: dict[Scope, frozenset[str]] = {}
        self._existed: set[Scope] = set(marker.read())
        self._in_bucket: set[Scope] = set()
        self._in_file: set[Scope] = set(self._existed)
        self._writing: asyncio.Task[None] | None = None
        self.complete = False
        self.own_writes = OwnWrites()
        self.on_removed: Callable[[str], None] = lambda _: None

    def find(self, digest: str) -> ApiKey | None:
        """Return the key with this hash, which may have expired."""
        return self._keys.get(digest)

    def find_named(self, name: str) -> dict[str, ApiKey]:
        """Return the keys of a name by their hash: two while the key is rotated."""
        return {digest: key for digest, key in self._keys.items() if key.name == name}

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
        before = self._keys.keys()
        self._keys, self._unparsable, self._in_bucket = {}, set(), set()
        for key, value in entries.items():
            self._take(key, value)
        self._index()
        self.complete = True
        for digest in before - self._keys.keys():
            self.on_removed(digest)

    def put(self, key: str, value: bytes) -> None:
        self._take(key, value)
        self._index()

    def remove(self, key: str) -> None:
        is_valid = self._keys.pop(key, None) is not None
        self._unparsable.discard(key)
        if scope := _MARKERS.get(key):
            self._in_bucket.discard(scope)
        self._index()
        if is_valid:
            self.on_removed(key)

    def on_written(self, key: str, value: bytes | None, revision: int) -> None:
        """Apply a change of this gateway, unless the watcher has delivered it or a newer one.

        Args:
            key: Hash of the API key.
            value: None: the key was revoked.
            revision: Of the change in the bucket.
        """
        if not self.own_writes.record(key, value, revision):
            return
        if value is None:
            self.remove(key)
        else:
            self.put(key, value)

    def _take(self, key: str, value: bytes) -> None:
        if scope := _MARKERS.get(key):
            self._in_bucket.add(scope)
            self._existed.add(scope)
            return
        self._keys.pop(key, None)
        parsed = parse_key(value)
        if parsed is None:
            self._unparsable.add(key)
            self._existed.update(_SCOPES)
            return
        self._unparsable.discard(key)
        self._keys[key] = parsed
        if parsed.scope in _SCOPES:
            self._existed.add(parsed.scope)

    def _index(self) -> None:
        scopes: dict[Scope, set[str]] = {"inference": set(), "read-only": set(), "admin": set()}
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

    async def mark(self, scope: Scope, write: Callable[[str], Awaitable[None]]) -> None:
        """Record the scope in the bucket and the file, before a key is added or revoked.

        Args:
            write: Writes an entry of the bucket by its name.
        """
        if scope not in _SCOPES:
            return
        self.note(scope)
        if scope not in self._in_bucket:
            await write(f"existed.{scope}")
            self._in_bucket.add(scope)
        if self._writing is not None:
            await self._writing


def parse_key(value: bytes) -> ApiKey | None:
    """Return the key of an entry; None if the entry cannot be parsed."""
    try:
        return ApiKey.model_validate_json(value)
    except ValidationError as e:
        log.warning("failed to parse an API key", extra={"faults": e.error_count()})
        return None
