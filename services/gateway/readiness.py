"""Whether the gateway can serve a request yet: its copies of the models and of the API keys.

At start, requests wait until the copies have been read. Later, a request whose model the catalogue
lacks waits until the catalogue has caught up with its bucket.
"""

from __future__ import annotations

import asyncio
import contextlib

from services.gateway.adapters.key_store import KeyStore
from services.gateway.authorization import INFERENCE_PREFIXES
from services.gateway.domain.catalog import Catalog, unknown_model
from shared.errors import ModelNotFound, Unavailable
from shared.messaging import Mesh
from shared.messaging.buckets import BucketWatcher

_STARTING_RETRY_MS = 1_000
_ADMIN_WAIT_S = 2.0
_CATALOG_TIMEOUT_S = 2.0
_KEYS_TIMEOUT_S = 2.0


class Readiness:
    """The readiness of the gateway. Requests wait for the copies that they need.

    Attributes:
        has_joined: The gateway's tasks run on a connected mesh.
        catalog_watcher: Keeps the catalogue current; None before the gateway has joined.
        keys_watcher: The same for the API keys.
    """

    def __init__(self, mesh: Mesh, catalog: Catalog, keys: KeyStore, closing: asyncio.Event, starting_timeout_s: float) -> None:
        """Create the readiness of a gateway that has not joined the mesh yet.

        Args:
            mesh: The connection to NATS.
            catalog: The copy of the models.
            keys: The copy of the API keys.
            closing: Set when the gateway begins to shut down.
            starting_timeout_s: Seconds that requests wait for the copies to be read.
        """
        self.has_joined = False
        self.catalog_watcher: BucketWatcher | None = None
        self.keys_watcher: BucketWatcher | None = None
        self._mesh = mesh
        self._catalog = catalog
        self._keys = keys
        self._closing = closing
        self._starting_timeout_s = starting_timeout_s
        self._state_read = asyncio.Event()

    @property
    def is_state_read(self) -> bool:
        """True once `on_tick` has seen that both copies have been read."""
        return self._state_read.is_set()

    def on_tick(self) -> None:
        """Wake the waiting requests once both copies have been read."""
        if self._has_state_for("/v1/"):
            self._state_read.set()

    def not_ready_reasons(self) -> list[str]:
        """List why requests are refused now; empty if they are accepted."""
        if not self.has_joined:
            return ["not connected to NATS yet"]
        reasons = {
            "stopping": self._closing.is_set(),
            "not connected to NATS": not self._mesh.is_connected,
            "the catalogue has not been read": not self._catalog.complete,
            "the API keys have not been read": not self._keys.complete,
        }
        return [reason for reason, holds in reasons.items() if holds]

    async def wait_for_state(self, path: str) -> None:
        """Wait until the models and API keys that `path` needs have been read.

        Requests wait instead of failing, since a restart must not use up clients' few retries.

        Raises:
            Unavailable: They could not be read within `starting_timeout`.
        """
        if self._has_state_for(path):
            return
        timeout_s = self._starting_timeout_s
        if path.startswith("/admin/"):
            timeout_s = min(timeout_s, _ADMIN_WAIT_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state_read.wait(), timeout_s)
        if not self._has_state_for(path):
            reasons = ", ".join(self.not_ready_reasons())
            raise Unavailable(f"The gateway is starting: {reasons}", retry_after_ms=_STARTING_RETRY_MS, should_retry=True)

    def _has_state_for(self, path: str) -> bool:
        keys_read = self.has_joined and self._keys.complete
        if path.startswith("/admin/"):
            return keys_read
        return not path.startswith(INFERENCE_PREFIXES) or (keys_read and self._catalog.complete)

    async def await_model(self, name: str) -> None:
        """Let the catalogue catch up if it lacks a model: it may have been registered just now."""
        if not self._catalog.has(name):
            await self.catch_up_catalog()

    async def hide_model(self, name: str) -> ModelNotFound:
        """Return the error for a model that the caller's key may not use.

        Takes as long as `await_model` does for a model that does not exist: response times do not
        reveal which models exist.
        """
        await self.catch_up_catalog()
        return unknown_model(name)

    async def catch_up_catalog(self) -> None:
        """Let the catalogue catch up with the registrations before this call."""
        if self.catalog_watcher is not None:
            await self.catalog_watcher.catch_up(_CATALOG_TIMEOUT_S)

    async def catch_up_keys(self) -> bool:
        """Let the copy of the API keys catch up; False: it did not in time."""
        return self.keys_watcher is not None and await self.keys_watcher.catch_up(_KEYS_TIMEOUT_S)
