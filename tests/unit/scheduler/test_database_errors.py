"""Errors of the database beside decisions: a line in the log, and a typed answer to operators."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import asyncpg
import pytest
from sqlalchemy.exc import OperationalError

from services.scheduler import app
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.volatile import LoaderPresence
from services.scheduler.handlers import Handlers
from shared.contracts.admin import ExplainPlan
from shared.contracts.loader import LoaderStatus
from shared.errors import Unavailable

ERRORS = [
    asyncpg.CannotConnectNowError("the database system is starting up"),
    asyncpg.InterfaceError("connection is closed"),
    OperationalError("SELECT 1", None, Exception()),
    ConnectionRefusedError(),
]
NOTHING: Any = None


class Away:
    """A database that is not there, and a loop without events."""

    prices = None

    def __init__(self, error: Exception) -> None:
        self.state = ClusterState(epoch=1)
        self.state.loaders["n"] = LoaderPresence("n", 0.0, LoaderStatus(node="n", boot_id="b"))
        self.asked: set[str] = set()
        self.has_tried_all = asyncio.Event()
        self._error = error

    def _fail(self, what: str) -> None:
        self.asked.add(what)
        if self.asked >= {"prune", "keep_loaders", "flush"}:
            self.has_tried_all.set()
        raise self._error

    async def prune(self, *_: object) -> None:
        self._fail("prune")

    async def keep_loaders(self, *_: object) -> None:
        self._fail("keep_loaders")

    async def flush(self, *_: object) -> None:
        self._fail("flush")

    async def plan(self, *_: object) -> None:
        self._fail("plan")

    async def last_plan(self, *_: object) -> None:
        self._fail("last_plan")

    async def next_tick(self) -> None:
        await asyncio.Event().wait()

    wait_until_idle = watch = next_tick


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
async def test_background_tasks_log_one_line_for_a_database_that_is_away(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for period in ("LOADER_STATUS_PERIOD_S", "FLUSH_PERIOD_S"):
        monkeypatch.setattr(app, period, 0.0)
    caplog.set_level(logging.WARNING)
    away: Any = Away(error)
    held = {"held memory": lambda: app._record_held(away, NOTHING)}
    async with asyncio.timeout(30), app._background_tasks(away, away, away, 1, away, held):
        await away.has_tried_all.wait()
    assert {r.getMessage() for r in caplog.records} == {
        "failed to prune old plans",
        "failed to persist loader status",
        "failed to record the memory held; it is recorded later",
    }
    assert not [r for r in caplog.records if r.exc_info]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("asked", [ExplainPlan(plan_id="p"), ExplainPlan(model="m")], ids=["plan", "model"])
async def test_explain_answers_unavailable_while_the_database_is_away(error: Exception, asked: ExplainPlan) -> None:
    away: Any = Away(error)
    handlers = Handlers(NOTHING, away, away, away, Policy(), "s", NOTHING, NOTHING, NOTHING)
    with pytest.raises(Unavailable) as found:
        await handlers._admin(asked)
    assert found.value.should_retry
    assert type(error).__name__ in found.value.message
