"""Bodies in files of the gateway."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import cast

import pytest

from services.gateway.adapters import held_bodies
from services.gateway.adapters.held_bodies import HeldBodies
from shared.messaging import Mesh


async def test_file_of_a_request_that_ends_while_it_is_opened_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proceed, opened = threading.Event(), list[int]()
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    open_unnamed = held_bodies._open_unnamed

    def open_late(directory: Path) -> int:
        loop.call_soon_threadsafe(begun.set)
        assert proceed.wait(60)
        opened.append(open_unnamed(directory))
        return opened[0]

    monkeypatch.setattr(held_bodies, "_open_unnamed", open_late)
    bodies = HeldBodies(cast(Mesh, None), "g", tmp_path)
    with bodies.scope() as scope:
        request = asyncio.create_task(scope.open())
        await begun.wait()
        request.cancel()
        await asyncio.wait([request])
    proceed.set()
    await asyncio.to_thread(lambda: None)
    async with asyncio.timeout(30):
        while not opened or _is_open(opened[0]):  # noqa: ASYNC110 - another thread opens and closes it
            await asyncio.sleep(0.01)
    assert request.cancelled()
    assert bodies.count == 0


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
