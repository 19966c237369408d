"""The pace of a loader's statuses while something changes, and while NATS is away."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from nats.errors import OutboundBufferLimitError

from services.loader import app
from services.loader.adapters.peer_sharing import Shared, Sharing
from services.loader.app import between_statuses_s
from services.loader.handlers import Loader
from shared.contracts.base import Message
from shared.contracts.loader import LoaderStatus
from shared.messaging import Mesh
from shared.tasks import end


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.0, 0.05), (0.001, 0.05), (0.004, 0.2), (1.0, 0.5)])
def test_large_statuses_take_two_percent_of_the_time_but_are_half_a_second_apart_at_most(took_s: float, pause_s: float) -> None:
    assert between_statuses_s(took_s) == pytest.approx(pause_s)


class Away:
    """The mesh, loader and sources of a node whose NATS has no room for more messages at first."""

    def __init__(self) -> None:
        self.published: list[Message] = []
        self.refused = 0
        self.arrived = asyncio.Event()
        self.changed = asyncio.Event()
        self.changed.set()

    def status(self, shared: Shared | None = None) -> Shared | LoaderStatus:
        return Shared() if shared is None else LoaderStatus(node="n", boot_id="b", pid=1)

    async def publish(self, subject: str, message: Message) -> None:
        if self.refused < 2:
            self.refused += 1
            raise OutboundBufferLimitError
        self.published.append(message)
        self.arrived.set()


async def test_a_loader_without_room_for_its_status_continues_and_sends_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    away = Away()
    task = asyncio.create_task(app._broadcast(cast(Mesh, away), cast(Loader, away), cast(Sharing, away), "subject"))
    waiting = asyncio.create_task(away.arrived.wait())
    async with asyncio.timeout(60):
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    assert not task.done()
    await end(task)
    assert away.refused == 2
    assert [r.message for r in caplog.records] == ["failed to publish the loader's status"]
