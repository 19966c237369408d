"""When an instance reports its state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from shared.contracts.engine import EngineLoad, EngineReport, EngineStart
from shared.engines import status_reporter as module
from shared.engines.status_reporter import StatusReporter
from shared.messaging import Mesh
from shared.telemetry.timeline import Timeline
from tests.unit.nodeagent.world import CARD

WITHIN_S = 60.0
START = EngineStart(instance_id="i", node="n", card=CARD, device="cpu:0", kv_bytes=1, log_path="")


class Sent:
    """Stands for the mesh: collects the reports."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[EngineReport] = asyncio.Queue()

    async def publish(self, _: str, report: Any) -> None:
        self.reports.put_nowait(report)

    async def next(self) -> EngineReport:
        async with asyncio.timeout(WITHIN_S):
            return await self.reports.get()


@asynccontextmanager
async def reporting(*, begins_at_once: bool) -> AsyncIterator[tuple[StatusReporter, Sent]]:
    sent = Sent()
    reporter = StatusReporter(cast(Mesh, sent), START, Timeline("engine"), EngineLoad, begins_at_once=begins_at_once)
    task = asyncio.create_task(reporter.publish_forever())
    try:
        yield reporter, sent
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_process_reports_at_once() -> None:
    async with reporting(begins_at_once=True) as (_, sent):
        assert (await sent.next()).state == "loading"


async def test_first_report_of_an_attach_waits_for_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRESS_S", WITHIN_S)
    async with reporting(begins_at_once=False) as (reporter, sent):
        for _ in range(5):
            await asyncio.sleep(0)
        assert sent.reports.empty()
        reporter.accept_requests()
        assert (await sent.next()).accepts_requests


async def test_first_report_of_an_attach_does_not_wait_long() -> None:
    async with reporting(begins_at_once=False) as (_, sent):
        assert (await sent.next()).state == "loading"
