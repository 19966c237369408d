"""Waits for a loader's statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.contracts import subjects
from shared.contracts.loader import LoaderStatus
from tests.integration.loader.conftest import Client


async def status_where(client: Client, node: str, wanted: Callable[[LoaderStatus], bool]) -> LoaderStatus:
    """Wait for the first received status that is `wanted`."""
    found: asyncio.Future[LoaderStatus] = asyncio.get_running_loop().create_future()
    latest: LoaderStatus | None = None

    async def hear(status: LoaderStatus) -> None:
        nonlocal latest
        latest = status
        if wanted(status) and not found.done():
            found.set_result(status)

    responder = client.mesh.listen(subjects.loader_status(node), LoaderStatus, hear)
    await responder.start()
    try:
        return await asyncio.wait_for(found, 60)
    except TimeoutError:
        raise AssertionError(f"no such status; the latest: {latest.model_dump_json(indent=1) if latest else 'none'}") from None
    finally:
        await responder.stop()
