"""Connections to Postgres, and the migrations that run at start."""

from __future__ import annotations

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from pydantic_core import from_json, to_json
from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

log = logging.getLogger(__name__)
MIGRATION_LOCK = 0x7468_6177_0001
LEADER_LOCK = 0x7468_6177_0002
_MIGRATIONS = Path(__file__).parent.parent / "migrations"


def async_url(url: str) -> str:
    """The URL for SQLAlchemy's asyncpg driver; `postgresql://` and `postgres://` are accepted too."""
    scheme, rest = url.split("://", 1)
    return f"postgresql+asyncpg://{rest}" if scheme in ("postgresql", "postgres", "postgresql+asyncpg") else url


def plain_url(url: str) -> str:
    """The same for asyncpg itself."""
    return make_url(async_url(url)).set(drivername="postgresql").render_as_string(hide_password=False)


def connect(url: str) -> AsyncEngine:
    return create_async_engine(
        async_url(url),
        pool_size=3,
        max_overflow=0,
        connect_args={"timeout": 5, "command_timeout": 10},
        pool_pre_ping=True,
        json_serializer=_to_json,
        json_deserializer=from_json,
    )


def _to_json(value: object) -> str:
    """Contracts are written as they are, without a dictionary of each in between."""
    return to_json(value).decode()


async def migrate(engine: AsyncEngine) -> None:
    """Bring the schema up to date. Schedulers that start together do it one after the other, in one transaction each."""
    async with engine.begin() as connection:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        await connection.run_sync(_upgrade)


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
