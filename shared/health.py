"""Report a service's health to its container.

The images name a file in `THAW_HEALTH_FILE`. A service checks itself every few seconds, over the
connection that it serves with, and writes the result there: nothing if it is healthy, else the
fault. The health check of the container reads the file with a shell (compose/thaw-healthy), and
fails as well if the file is old, as that of a service that hangs. See docs/adr/0114.

scheduler             some scheduler leads and answers over NATS: a standby is healthy as long as
                      its mesh has a leader
nodeagent, loader     the status of this node arrives over NATS
migrator              the bucket of migrations is readable
gateway               as `/ready`: connected to NATS, the catalogue read, not stopping
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from nats.js.errors import BucketNotFoundError

from shared.contracts import subjects
from shared.contracts.admin import ClusterView, ViewCluster
from shared.errors import ThawError
from shared.messaging import Mesh
from shared.messaging.replies import decode_reply
from shared.telemetry.logs import LogRateLimit

log = logging.getLogger(__name__)
VARIABLE: Final = "THAW_HEALTH_FILE"
PERIOD_S: Final = 5.0
LEADER_PERIOD_S: Final = 15.0
"""Period of a scheduler's check, which asks for a view of the mesh. Both periods are below the age
at which the container's check takes a report for too old.
"""
_WITHIN_S = 5.0
_NOT_CONNECTED = "There is no connection to NATS"

Check = Callable[[], Awaitable[str]]
"""Returns the fault, or "" if the service is healthy."""


async def report_health(check: Check, every_s: float = PERIOD_S) -> None:
    """Check the service, and write the result to the file, until cancelled.

    Returns at once if the environment names no file: outside containers the supervisor asks.

    Args:
        check: Finds the fault.
        every_s: Seconds between two checks.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return
    failures = LogRateLimit()
    while True:
        fault = await find_fault(check)
        try:
            _write(Path(name), fault)
        except OSError as e:  # the container's check shows that the file is old
            if failures.allows(type(e).__name__):
                log.warning("failed to report the service's health", extra={"error": repr(e)})
        await asyncio.sleep(every_s)


async def find_fault(check: Check) -> str:
    """Return the fault that a check finds, or what prevented the check."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            return await check()
    except TimeoutError:
        return f"Nothing was received over NATS within {_WITHIN_S:g} s"
    except ThawError as e:
        return e.message
    except Exception as e:  # of whatever kind: the service is not healthy, and this is why
        return f"{type(e).__name__}: {e}"


async def check_leader(mesh: Mesh) -> str:
    """Check that a scheduler leads and answers.

    Raises:
        ThawError: None does.
    """
    if not mesh.is_connected:
        return _NOT_CONNECTED
    view = ViewCluster(brief=True, deadline_ms=int(_WITHIN_S * 1e3))
    # The view of a large mesh takes longer to parse than an event loop may stand still.
    await asyncio.to_thread(decode_reply, await mesh.fetch(subjects.ADMIN, view), ClusterView)
    return ""


async def check_status(mesh: Mesh, subject: str) -> str:
    """Check that a status arrives on `subject`, to which this service publishes every second.

    Raises:
        TimeoutError: None does.
    """
    if not mesh.is_connected:
        return _NOT_CONNECTED
    subscription = await mesh.nc.subscribe(subject)
    try:
        await subscription.next_msg(timeout=_WITHIN_S)
    finally:
        with contextlib.suppress(Exception):  # the connection is lost, and the subscription with it
            await subscription.unsubscribe()
    return ""


async def check_migrations(mesh: Mesh) -> str:
    """Check that the bucket of migrations can be read."""
    if not mesh.is_connected:
        return _NOT_CONNECTED
    try:
        await (await mesh.nc.jetstream(timeout=_WITHIN_S).key_value(subjects.MIGRATIONS_BUCKET)).status()
    except BucketNotFoundError:
        return "The bucket of migrations does not exist yet"
    return ""


def _write(file: Path, fault: str) -> None:
    """Replace the file: a reader finds the old report or the new one, and no part of one."""
    draft = file.with_name(f"{file.name}.new")
    draft.write_text(f"{fault}\n" if fault else "")
    draft.rename(file)


if __name__ == "__main__":  # the check of 0.2.0, whose manifests may meet newer images
    os.execvp("thaw-healthy", ["thaw-healthy"])
