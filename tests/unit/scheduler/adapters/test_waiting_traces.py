"""Traces of loads that wait for JetStream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from services.scheduler.adapters import clock
from services.scheduler.adapters import outbox as outbox_module
from services.scheduler.adapters.load_traces import LoadTraces
from services.scheduler.adapters.outbox import Outbox
from services.scheduler.domain.effects import LoadEnded
from shared.contracts import subjects
from shared.contracts.plans import PlanRecord


class Streams:
    """A fake JetStream.

    Attributes:
        answers: Delays answers until it is set.
        fails: Answers are too late.
    """

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.fails = False
        self.asked: list[str] = []

    async def publish(self, subject: str, data: bytes, timeout: float) -> None:
        self.asked.append(subject)
        self.is_asked.set()
        await self.answers.wait()
        if self.fails:
            raise NatsTimeoutError


def ended(number: int) -> LoadEnded:
    plan = PlanRecord(plan_id=f"p-{number}", model="m", created=0.0, trigger="demand", way="load", outcome="ready")
    return LoadEnded(plan, "n", 0.0, 1.0)


def make(streams: Any) -> Outbox:
    nothing: Any = None
    return Outbox(nothing, streams, nothing, LoadTraces(), nothing, nothing, 1.0, nothing, nothing, nothing)


async def test_traces_that_wait_for_jetstream_are_bounded_and_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox_module, "MAX_TRACES", 5)
    streams = Streams()
    outbox = make(streams)
    outbox.carry_out([ended(0)], clock.now())
    await streams.is_asked.wait()
    outbox.carry_out([ended(n) for n in range(1, 21)], clock.now())
    assert outbox.dropped_traces == 15
    streams.answers.set()
    await asyncio.gather(*(lane.task for lane in outbox._lanes.values()))
    assert streams.asked == [subjects.load_trace(f"p-{n}") for n in (0, *range(16, 21))]
    assert [r.getMessage() for r in caplog.records] == ["failed to publish a load trace"], "once a minute"


async def test_traces_that_jetstream_does_not_take_are_counted() -> None:
    streams = Streams()
    streams.fails = True
    streams.answers.set()
    outbox = make(streams)
    outbox.carry_out([ended(n) for n in range(3)], clock.now())
    await asyncio.gather(*(lane.task for lane in outbox._lanes.values()))
    assert outbox.dropped_traces == 3
