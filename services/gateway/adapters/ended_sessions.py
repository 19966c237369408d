"""Sessions of the console that were ended by a logout, for all gateways of the mesh."""

from __future__ import annotations

import logging
import math
import time

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from services.gateway.domain.console_session import Session
from shared.errors import Unavailable
from shared.messaging import Mesh
from shared.messaging.full_stores import full_as
from shared.messaging.streams import console_bucket
from shared.telemetry.logs import LogRateLimit

log = logging.getLogger(__name__)
RECHECK_S = 2.0
"""A session that had not ended is looked up again after so long."""
_MAX_SEEN = 4096
_LOOKUP_TIMEOUT_S = 1
"""Every request of the console waits for it, also if NATS is away."""
_END_TIMEOUT_S = 5
_FULL = "The store of ended sessions is full. Repeat the logout later, or revoke the session's key"


class EndedSessions:
    """Entries of the bucket `thaw_console` with the nonces of sessions; they expire with these.

    Without NATS a session that has ended elsewhere is not known to have.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._bucket: KeyValue | None = None
        self._ended: dict[str, int] = {}
        """Unix seconds at which ended sessions expire, by nonce."""
        self._seen: dict[str, float] = {}
        """When sessions were looked up that had not ended, by nonce."""
        self._failures = LogRateLimit()

    async def end(self, session: Session) -> None:
        """Record that a session has ended.

        Raises:
            StoreFull: There is no room.
            Unavailable: NATS cannot be reached.
        """
        left_s = max(1, math.ceil(session.expires - time.time()))
        try:
            with full_as(_FULL):
                bucket = await console_bucket(self._mesh.nc.jetstream(timeout=_END_TIMEOUT_S), self._mesh.replicas)
                await bucket.create(_entry(session.nonce), b"1", msg_ttl=left_s)
        except KeyWrongLastSequenceError:
            pass  # it has ended already
        except (NatsError, TimeoutError) as e:
            raise Unavailable(f"The session cannot be ended now ({type(e).__name__}). Repeat the logout", should_retry=True) from e
        self._note_ended(session)

    async def has_ended(self, session: Session) -> bool:
        """Return whether a session that has not expired was ended, at any gateway."""
        if session.nonce in self._ended:
            return True
        now = time.monotonic()
        if now - self._seen.get(session.nonce, -math.inf) < RECHECK_S:
            return False
        try:
            await (await self._open()).get(_entry(session.nonce))
        except KeyNotFoundError:
            self._failures.reset()
        except (NatsError, TimeoutError) as e:
            if self._failures.allows("read"):
                log.warning("failed to look up whether a session of the console has ended", extra={"error": repr(e)})
        else:
            self._note_ended(session)
            return True
        if len(self._seen) >= _MAX_SEEN:
            self._seen = {nonce: at for nonce, at in self._seen.items() if now - at < RECHECK_S}
        self._seen[session.nonce] = now
        return False

    def _note_ended(self, session: Session) -> None:
        now = time.time()
        self._ended = {nonce: expires for nonce, expires in self._ended.items() if expires > now}
        self._ended[session.nonce] = session.expires

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            self._bucket = await console_bucket(self._mesh.nc.jetstream(timeout=_LOOKUP_TIMEOUT_S), self._mesh.replicas)
        return self._bucket


def _entry(nonce: str) -> str:
    return f"ended.{nonce}"
