"""Connections to Postgres, and the schema migrations at start."""

from __future__ import annotations

import logging
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from pydantic_core import from_json, to_json
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

if TYPE_CHECKING:
    from alembic.config import Config

log = logging.getLogger(__name__)
MIGRATION_LOCK = 0x7468_6177_0001
CONNECT_TIMEOUT_S = 3
LEADER_LOCK = 0x7468_6177_0002
NEWEST_REVISION = "0016"
"""The newest schema in `migrations/versions`."""
DATABASE_ERRORS = (SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError)
"""Errors of a statement. SQLAlchemy does not wrap those of connecting (`open_connection`)."""
_MIGRATIONS = Path(__file__).parent.parent / "migrations"
_PROBE_S = 1
_GIVE_UP_MS = 1500
_VANISHED_CLIENT = {
    "tcp_keepalives_idle": str(_PROBE_S),
    "tcp_keepalives_interval": str(_PROBE_S),
    "tcp_keepalives_count": "2",
    "tcp_user_timeout": str(_GIVE_UP_MS),
    "client_connection_check_interval": "1000",
}
"""Have the server end a session whose client's host has vanished, with its locks."""
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
_REPLACEMENT = r"\1\\ufffd"


@dataclass(frozen=True)
class Database:
    """A scheduler's connections to PostgreSQL.

    Attributes:
        commits: One connection for the commits of decisions: they wait for no view and no report.
        shared: Three connections for everything else.
    """

    commits: AsyncEngine
    shared: AsyncEngine

    async def close(self) -> None:
        await self.commits.dispose()
        await self.shared.dispose()


def plain_url(url: str) -> str:
    """Return the URL for PostgreSQL's own clients, from any of the accepted schemes."""
    return f"postgresql://{url.split('://', 1)[1]}"


def hosts_of(url: str) -> list[str]:
    """Return one URL for each server of `postgresql://user:password@host:port,host:port/name`."""
    parts = urlsplit(plain_url(url))
    user, at, hosts = parts.netloc.rpartition("@")
    return [urlunsplit(parts._replace(netloc=f"{user}{at}{host}")) for host in hosts.split(",")]


async def open_connection(url: str, **options: Any) -> asyncpg.Connection:
    """Connect to the URL's first server that accepts writes: the present primary.

    asyncpg's own list of servers stops at the first one that answers with an error, for example
    while it is starting. Both ends notice a host that vanished within three seconds.

    Raises:
        OSError, asyncpg.PostgresError or asyncpg.InterfaceError: The last server's error, if none
            accepts writes.
    """
    *others, last = hosts_of(url)
    for server in others:
        try:
            return await _primary(server, options)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as e:
            log.debug("not the primary", extra={"server": urlsplit(server).netloc.rpartition("@")[2], "error": repr(e)})
    return await _primary(last, options)


async def _primary(server: str, options: dict[str, Any]) -> asyncpg.Connection:
    given = {**options, "server_settings": _VANISHED_CLIENT | options.get("server_settings", {})}
    try:
        connection = await asyncpg.connect(server, timeout=CONNECT_TIMEOUT_S, target_session_attrs="read-write", **given)
    except asyncpg.exceptions.TargetServerAttributeNotMatched as e:
        place = urlsplit(server).netloc.rpartition("@")[2]
        raise ConnectionRefusedError(f"PostgreSQL at {place} accepts no writes: it is a standby until it is promoted") from e
    _notice_vanished_server(connection)
    return connection


def _notice_vanished_server(connection: asyncpg.Connection) -> None:
    """Have the kernel probe the server's host, and end the connection without an answer."""
    transport = connection._transport  # asyncpg has no public access to its socket
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _PROBE_S),
        ("TCP_KEEPALIVE", _PROBE_S),
        ("TCP_KEEPINTVL", _PROBE_S),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", _GIVE_UP_MS),
    ):
        if (number := getattr(socket, option, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, number, value)


def refused_login(error: BaseException) -> str | None:
    """Return what to correct if PostgreSQL refuses user, password or database; else None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, asyncpg.InvalidAuthorizationSpecificationError | asyncpg.InvalidCatalogNameError):
            return (
                f"PostgreSQL runs but refuses the scheduler: {cause}. "
                "Correct the user, password and database of THAW_DATABASE_URL, and restart the scheduler"
            )
        cause = getattr(cause, "orig", None) or cause.__cause__
    return None


def open_database(url: str) -> Database:
    return Database(connect(url, 1), connect(url))


def connect(url: str, most: int = 3) -> AsyncEngine:
    """Return a pool of up to `most` connections, which are opened when they are used."""
    return create_async_engine(
        "postgresql+asyncpg://",
        async_creator=lambda: open_connection(url, command_timeout=10),
        pool_size=most,
        max_overflow=0,
        pool_pre_ping=True,
        json_serializer=_to_json,
        json_deserializer=from_json,
    )


def _to_json(value: object) -> str:
    """Serialize contracts directly, without an intermediate dictionary.

    PostgreSQL refuses NUL characters, which the end of an engine's log may have. A refused commit
    would end the term, and the next one as well.
    """
    text = to_json(value).decode()
    return _NUL.sub(_REPLACEMENT, text) if "\\u0000" in text else text


async def migrate(engine: AsyncEngine) -> None:
    """Upgrade the schema, if it is not up to date.

    Concurrent schedulers take turns, in one transaction each.
    """
    async with engine.begin() as connection:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        if await _revision(connection) != NEWEST_REVISION:
            await connection.run_sync(_upgrade)


async def _revision(connection: AsyncConnection) -> str | None:
    """Return the schema's revision; None for a new database."""
    if await connection.scalar(text("SELECT to_regclass('alembic_version')")) is None:
        return None
    found: str | None = await connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


def _upgrade(connection: Connection) -> None:
    from alembic import command

    command.upgrade(alembic_config(connection), "head")


def alembic_config(connection: Connection) -> Config:
    """Return Alembic's configuration for the schema that `connection` is connected to."""
    # Imported here because a restarted scheduler, whose schema is up to date, does not need it.
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
