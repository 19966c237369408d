"""Check NATS and PostgreSQL servers by connecting to them."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit, urlunsplit

from shared.contracts.findings import Finding
from thaw.errors import CommandError
from thaw.launcher.plan import MeshPlan
from thaw.units import format_size

_CONNECT_S = 3
_START_S = 10
"""A new mesh must not fail because its machine is busy."""
_UNREADABLE = "{} cannot be read: its host or its port is not valid"
"""The error itself is not shown: it may have a part of the password."""
_WRITE_AS = "Write it as {}, and in the password %23 for #, %2F for /, %3F for ? and %40 for @."


def check_servers(plan: MeshPlan) -> None:
    """Check the servers that the mesh uses and does not start itself.

    Raises:
        CommandError: A server does not answer, refuses the login or lacks what Thaw needs.
    """
    for name, url, check in (("NATS", plan.nats_url, check_nats), ("PostgreSQL", plan.database_url, check_postgres)):
        if url is not None and (finding := asyncio.run(check(url, _START_S))).level == "fail":
            raise CommandError(f"{name}: {finding.text.rstrip('.')}.", finding.remedy, code="server_unusable")


async def check_nats(url: str, timeout_s: int = _CONNECT_S) -> Finding:
    """Check servers of `url`, comma-separated: login, JetStream and the size of a message."""
    from nats.aio.client import Client
    from nats.errors import Error
    from nats.js.errors import Error as JetStreamError

    from shared.nats_urls import requires_tls

    try:
        place, *_ = [_without_secrets(server if "://" in server else f"nats://{server}") for server in url.split(",")]
        tls_first = requires_tls(url.split(","))
    except ValueError:
        return Finding("nats", "fail", _UNREADABLE.format("THAW_NATS_URL"), _WRITE_AS.format("nats://user:password@host:port"))
    errors: list[Exception] = []
    client = Client()

    async def note(error: Exception) -> None:
        errors.append(error)

    try:
        await client.connect(
            url.split(","),
            connect_timeout=timeout_s,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            error_cb=note,
            tls_handshake_first=tls_first,
        )
    except (Error, OSError, TimeoutError) as e:
        await client.close()  # a refused login leaves its connection open
        why = errors[0] if errors else e
        if "authorization" in str(why).lower():
            return Finding(
                "nats", "fail", f"{place} runs but refuses the login: {why}", "Correct the credentials in THAW_NATS_URL."
            )
        return Finding(
            "nats",
            "fail",
            f"{place} does not answer: {str(why) or type(why).__name__}",
            "Start it, or correct THAW_NATS_URL and its credentials.",
        )
    try:
        limit = client.max_payload
        try:
            await client.jetstream().account_info()
        except (JetStreamError, Error, TimeoutError):
            return Finding(
                "nats", "fail", f"{place} has no JetStream", "Thaw keeps its catalogue and traces there: run nats-server with -js."
            )
    finally:
        await client.close()
    if limit < 1024 * 1024:
        return Finding(
            "nats",
            "fail",
            f"{place} takes messages up to {format_size(limit)} only",
            "Set max_payload to 1MB at least, 8MB better.",
        )
    if limit < 8 * 1000 * 1000:
        return Finding(
            "nats", "warn", f"{place} takes messages up to {format_size(limit)}", "Long prompts need more: set max_payload to 8MB."
        )
    return Finding("nats", "ok", f"{place}, JetStream on, messages up to {format_size(limit)}")


async def check_postgres(url: str, timeout_s: int = _CONNECT_S) -> Finding:
    """Check the servers of `url`: one of them accepts the login and writes."""
    try:
        servers = [(server, _without_secrets(server)) for server in _servers(url)]
    except ValueError:
        remedy = _WRITE_AS.format("postgresql://user:password@host:port/name")
        return Finding("postgres", "fail", _UNREADABLE.format("THAW_DATABASE_URL"), remedy)
    found = [await _check_postgres(server, place, timeout_s) for server, place in servers]
    return next((f for f in found if f.level == "ok"), found[-1])


def _servers(url: str) -> list[str]:
    """Return one URL for each server of `postgresql://user:password@host:port,host:port/name`."""
    parts = urlsplit(url.replace("+asyncpg", ""))
    user, at, hosts = parts.netloc.rpartition("@")
    return [urlunsplit(parts._replace(netloc=f"{user}{at}{host}")) for host in hosts.split(",")]


async def _check_postgres(url: str, place: str, timeout_s: int) -> Finding:
    import asyncpg

    try:
        connection = await asyncpg.connect(url, timeout=timeout_s, target_session_attrs="read-write")
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as e:
        remedy = "Correct the user, password and database of THAW_DATABASE_URL."
        return Finding("postgres", "fail", f"{place} runs but refuses the login: {e}", remedy)
    except ValueError as e:
        remedy = "Write it as postgresql://user:password@host:port/name."
        return Finding("postgres", "fail", f"THAW_DATABASE_URL cannot be read: {e}", remedy)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.TargetServerAttributeNotMatched) as e:
        remedy = "Start it, or correct THAW_DATABASE_URL and its credentials."
        return Finding("postgres", "fail", f"{place} does not answer: {str(e) or type(e).__name__}", remedy)
    try:
        version = connection.get_server_version()
    finally:
        await connection.close()
    if version.major < 14:
        return Finding("postgres", "fail", f"{place} is PostgreSQL {version.major}", "Thaw needs 14 or later.")
    return Finding("postgres", "ok", f"{place}, PostgreSQL {version.major}.{version.minor}")


def _without_secrets(url: str) -> str:
    parts = urlsplit(url.split(",")[0])
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
