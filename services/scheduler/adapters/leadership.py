"""Leader election by a Postgres advisory lock, on a connection of its own.

A standby waits inside `pg_advisory_lock` and leads as soon as the lock is free. If a leader's host
vanishes, both ends probe the connection every second and close it after 1.5 s without an answer
(`TCP_USER_TIMEOUT`): the lock is free within three seconds, and the old leader notices. Its later
writes are refused by their epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from services.scheduler.adapters.database import LEADER_LOCK, open_connection

log = logging.getLogger(__name__)
_SERVER_SIDE = {
    "application_name": "thaw-scheduler-leadership",
    "idle_session_timeout": "0",
    "lock_timeout": "0",
    "statement_timeout": "0",
}


@dataclass
class Term:
    """One term of leadership.

    Attributes:
        epoch: Its fencing epoch, larger than every earlier one.
        lost: Set when the lock's connection is closed.
    """

    epoch: int
    lost: asyncio.Event = field(default_factory=asyncio.Event)


@contextlib.asynccontextmanager
async def leadership(url: str, above: int = 0) -> AsyncIterator[Term]:
    """Wait for the lock, then lead under a new epoch, larger than every earlier one and `above`.

    Raises:
        OSError or asyncpg.PostgresError: The database is unreachable, or was lost while waiting.
    """
    connection = await open_connection(url, server_settings=_SERVER_SIDE)
    try:
        await connection.fetchval("SELECT pg_advisory_lock($1)", LEADER_LOCK)
        epoch = await connection.fetchval(
            "UPDATE leadership SET epoch = greatest(epoch, $1) + 1 WHERE id = 1 RETURNING epoch", above, timeout=5
        )
        term = Term(int(epoch))
        connection.add_termination_listener(lambda _: term.lost.set())
        log.info("leading", extra={"epoch": term.epoch})
        yield term
    finally:
        # Closing the connection frees the lock in any state.
        connection.terminate()
