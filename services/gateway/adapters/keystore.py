"""API keys that operators add and revoke: hashes in a JetStream bucket that every gateway follows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from pydantic import ValidationError

from shared.contracts.keys import ApiKey, Scope
from shared.errors import Conflict, NotFound, Unavailable
from shared.messaging import Mesh
from shared.messaging.bounds import full_as
from shared.messaging.streams import keys_bucket

log = logging.getLogger(__name__)
_FULL = "The store of API keys has no room for another one (16 MiB). Revoke keys that are not used, with `thaw keys revoke NAME`."


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except (NatsError, TimeoutError) as e:
        raise Unavailable(f"the store of API keys cannot be reached: {type(e).__name__}", should_retry=True) from e


class KeyStore:
    """A copy of the bucket, and its writer. `complete` once the bucket has been read: until then nobody can say who may do what."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._keys: dict[str, ApiKey] = {}
        self._scopes: dict[Scope, frozenset[str]] = {}
        self.complete = False

    def hashes(self, scope: Scope) -> frozenset[str]:
        return self._scopes.get(scope, frozenset())

    def all(self) -> list[ApiKey]:
        return sorted(self._keys.values(), key=lambda k: (k.name, k.created))

    # The copy.

    def replace(self, entries: dict[str, bytes]) -> None:
        self._keys = {h: key for h, value in entries.items() if (key := _parsed(value)) is not None}
        self._index()
        self.complete = True

    def put(self, key: str, value: bytes) -> None:
        parsed = _parsed(value)
        if parsed is not None:
            self._keys[key] = parsed
            self._index()

    def remove(self, key: str) -> None:
        self._keys.pop(key, None)
        self._index()

    def _index(self) -> None:
        scopes: dict[Scope, set[str]] = {"inference": set(), "admin": set()}
        for digest, key in self._keys.items():
            scopes[key.scope].add(digest)
        self._scopes = {scope: frozenset(found) for scope, found in scopes.items()}

    # The writer.

    async def add(self, digest: str, key: ApiKey) -> None:
        """Raises `Conflict` if there is a key of that name, or that very key."""
        if any(k.name == key.name for k in self._keys.values()):
            raise Conflict(f"There is an API key called {key.name} already; revoke it, or choose another name", param="name")
        value = key.model_dump_json().encode()
        with _reachable():
            bucket = await keys_bucket(self._mesh.nc.jetstream(timeout=3), self._mesh.replicas)
            try:
                with full_as(_FULL):
                    await bucket.create(digest, value)
            except KeyWrongLastSequenceError as e:
                raise Conflict("This API key is known already, under another name", param="sha256") from e
        self.put(digest, value)

    async def revoke(self, name: str) -> ApiKey:
        """Raises `NotFound` if there is no such key."""
        found = [(digest, key) for digest, key in self._keys.items() if key.name == name]
        if not found:
            raise NotFound(f"There is no API key called {name}; `thaw keys list` shows those that there are", param="name")
        with _reachable():
            bucket = await keys_bucket(self._mesh.nc.jetstream(timeout=3), self._mesh.replicas)
            for digest, _ in found:
                try:
                    await bucket.delete(digest)
                except KeyNotFoundError:
                    log.info("an API key had been revoked by another gateway", extra={"name_of_key": name})
                self.remove(digest)
        return found[0][1]


def _parsed(value: bytes) -> ApiKey | None:
    try:
        return ApiKey.model_validate_json(value)
    except ValidationError as e:
        log.warning("an entry of the API keys cannot be understood", extra={"faults": e.error_count()})
        return None
