"""The secret that signs the console's sessions, shared by all gateways of the mesh."""

from __future__ import annotations

import logging
import secrets

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

from shared.errors import Unavailable
from shared.messaging import Mesh
from shared.messaging.streams import console_bucket

log = logging.getLogger(__name__)
_ENTRY = "secret"
_BYTES = 32


class ConsoleSecret:
    """The secret in the bucket `thaw_console`: random, created by the first gateway that needs it.

    A restarted gateway therefore accepts the sessions of its predecessor.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._value: bytes | None = None

    async def read(self) -> bytes:
        """Return the secret; the bucket is read once. Raises `Unavailable` without NATS."""
        if self._value is None:
            try:
                self._value = await self._read_or_create()
            except (NatsError, TimeoutError) as e:
                raise Unavailable(
                    f"The sessions of the console cannot be checked now ({type(e).__name__}). Repeat the request", should_retry=True
                ) from e
        return self._value

    async def _read_or_create(self) -> bytes:
        bucket = await console_bucket(self._mesh.nc.jetstream(timeout=3), self._mesh.replicas)
        while True:
            try:
                found = (await bucket.get(_ENTRY)).value or b""
                if len(found) >= _BYTES:
                    return found
            except KeyNotFoundError:
                try:
                    await bucket.create(_ENTRY, secrets.token_bytes(_BYTES))
                except KeyWrongLastSequenceError:
                    log.info("another gateway has created the console's secret")
