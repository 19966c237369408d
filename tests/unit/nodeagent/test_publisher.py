"""A nodeagent publishes whole statuses, and the changes between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from services.nodeagent.adapters import publisher as publisher_module
from services.nodeagent.adapters.meter import Meter
from services.nodeagent.adapters.publisher import Publisher
from services.nodeagent.adapters.timelines import Timelines
from services.nodeagent.domain.ended_engines import SHOWN_S
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.state import Ended, Instance, NodeState, Process
from shared.contracts.node import EndedEngine, InstanceState, NodeChanges, NodeStatus, SwapSpace
from shared.messaging import Mesh
from tests.unit.nodeagent.world import start

WITHIN_S = 60.0
MANY = 40


class RecordingMesh:
    """A mesh without a connection, which records published messages."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, NodeStatus | NodeChanges]] = []
        self._changed = asyncio.Condition()

    async def publish(self, subject: str, message: Any) -> None:
        async with self._changed:
            self.messages.append((subject.rpartition(".")[2], message))
            self._changed.notify_all()

    async def until(self, count: int) -> tuple[str, NodeStatus | NodeChanges]:
        """Return the message number `count`, once it is published."""
        async with asyncio.timeout(WITHIN_S), self._changed:
            await self._changed.wait_for(lambda: len(self.messages) >= count)
            return self.messages[count - 1]


SWAP = SwapSpace(total_bytes=4, free_bytes=3)


class Node:
    """A node's state and its publisher."""

    def __init__(self, count: int) -> None:
        instances = [Instance(command=start(f"i{n}"), token=1, progress_at=0.0, process=Process.ALIVE) for n in range(count)]
        self.state = NodeState(Ledger({"cpu:0": 100}), instances={i.instance_id: i for i in instances})
        self.sent = RecordingMesh()
        meter = Meter({}, lambda: self.state, lambda: None, lambda *_: None)
        mesh, timelines = cast(Mesh, self.sent), Timelines("agent")
        self.publisher = Publisher(mesh, "n", {}, {}, lambda: self.state, meter, timelines, lambda: (), lambda: SWAP)

    def change(self, name: str, *, is_awaited: bool = False) -> None:
        changed = self.state.instances[name].model_copy(update={"state": InstanceState.READY})
        self.state = replace(self.state, instances={**self.state.instances, name: changed})
        self.publisher.notify_changed(urgent=True, is_awaited=is_awaited)


@asynccontextmanager
async def running(count: int) -> AsyncIterator[Node]:
    node = Node(count)
    task = asyncio.create_task(node.publisher.run())
    try:
        await node.sent.until(1)
        yield node
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
def only_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no whole status be due after the first during the test."""
    monkeypatch.setattr(publisher_module, "STATUS_INTERVAL_S", 1e4)


@pytest.mark.usefixtures("only_changes")
@pytest.mark.parametrize("count", [9, MANY])
async def test_a_node_with_many_instances_publishes_what_has_changed(count: int) -> None:
    async with running(count) as node:
        subject, first = node.sent.messages[0]
        assert isinstance(first, NodeStatus)
        assert (subject, len(first.instances), first.swap) == ("status", count, SWAP)
        node.change("i7")
        subject, changes = await node.sent.until(2)
        assert (subject, [i.instance_id for i in changes.instances]) == ("changes", ["i7"])
        assert changes.seq == first.seq + 1
        node.change("i8")
        _, changes = await node.sent.until(3)
        assert [i.instance_id for i in changes.instances] == ["i8"]


@pytest.mark.usefixtures("only_changes")
async def test_a_whole_status_is_sent_on_request() -> None:
    async with running(MANY) as node:
        node.publisher.want_whole()
        subject, status = await node.sent.until(2)
        assert (subject, len(status.instances)) == ("status", MANY)


@pytest.mark.usefixtures("only_changes")
async def test_engines_that_ended_some_time_ago_are_in_the_status_that_is_asked_for() -> None:
    async with running(3) as node:
        ended = EndedEngine(instance_id="x", pid=7, model="m", device_kind="cpu", device_count=1, charged_s=1.5)
        node.state = replace(node.state, ended_engines=(Ended(time.monotonic() - 2 * SHOWN_S, ended),))
        node.change("i1")
        _, routine = await node.sent.until(2)
        node.publisher.want_whole()
        _, asked = await node.sent.until(3)
        assert isinstance(routine, NodeStatus)
        assert isinstance(asked, NodeStatus)
        assert (routine.ended_engines, asked.ended_engines) == ((), (ended,))


@pytest.mark.usefixtures("only_changes")
async def test_a_node_with_few_instances_publishes_its_whole_status() -> None:
    async with running(3) as node:
        node.change("i1")
        subject, status = await node.sent.until(2)
        assert (subject, len(status.instances)) == ("status", 3)


async def test_a_whole_status_follows_within_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "STATUS_INTERVAL_S", 0.05)
    async with running(MANY) as node:
        subject, status = await node.sent.until(2)
        assert (subject, len(status.instances)) == ("status", MANY)


@pytest.mark.usefixtures("only_changes")
async def test_a_change_that_requests_wait_for_does_not_wait_for_other_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "_COALESCE_S", 1e4)
    async with running(3) as node:
        node.change("i0")
        node.change("i1", is_awaited=True)
        _, status = await node.sent.until(2)
        assert [i.state for i in status.instances][:2] == [InstanceState.READY] * 2
