"""Scheduler processes: consecutive deaths of leaders, export of load traces."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from shared.contracts.admin import ExplainPlan, PlanExplained
from shared.contracts.demand import DemandNoted
from shared.contracts.node import NODE_LOST_AFTER_S, StopInstance
from shared.errors import DeadlineExceeded, Unavailable, Unreachable
from tests.integration.scheduler.conftest import Site, process, spec, standby
from tests.integration.scheduler.held_starts import begin_start, end_start
from tests.integration.scheduler.queries import ready
from tests.support.fake_node import MIB
from tests.support.otlp import OtlpReceiver


async def log_of(scheduler: asyncio.subprocess.Process) -> str:
    """Return the log of an ended process."""
    _, stderr = await scheduler.communicate()
    return stderr.decode()


async def insist(site: Site, model: str) -> DemandNoted:
    """Repeat demand until a leader replies, as a gateway does."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await site.demand(model, 1, deadline_ms=1000)
            except (Unreachable, Unavailable, DeadlineExceeded):
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
async def test_leaders_are_killed_with_demand_in_flight(site: Site, kills: int) -> None:
    node = await site.node(budget=(kills + 1) * 400 * MIB)
    running = [await process(site, "scheduler-0")]
    logs = []
    try:
        await site.add(*(spec(f"model-{n}", keep_alive=-1) for n in range(kills)))
        for n in range(kills):
            running.append(await process(site, f"scheduler-{n + 1}"))
            await standby(site)
            node.hold_starts = asyncio.Event()
            demand = asyncio.create_task(insist(site, f"model-{n}"))
            if n % 2:  # half of the leaders have begun the start, others may not have received the demand yet
                await site.until(lambda n=n: bool(node.starts(f"model-{n}")))
            leader = running.pop(0)
            leader.send_signal(signal.SIGKILL)
            logs.append(await log_of(leader))
            await demand
            node.hold_starts.set()

            async def served(n: int = n) -> bool:
                return (await insist(site, f"model-{n}")).outlook == "ready"

            await site.until(served)
        for n in range(kills):
            assert (await insist(site, f"model-{n}")).outlook == "ready"
            assert ready(node, f"model-{n}")
            assert len(node.started(f"model-{n}")) == 1, "one load, whichever scheduler leads"
            explained: PlanExplained = await site.ask(ExplainPlan(model=f"model-{n}"), PlanExplained)
            assert explained.plan.outcome == "ready"
        assert not [c for c in node.commands if isinstance(c, StopInstance)]
        assert (await site.view()).epoch == kills + 1
    finally:
        for scheduler in running:
            scheduler.terminate()
            logs.append(await log_of(scheduler))
    assert [s.returncode for s in running] == [0]
    for log in logs:
        for sign in ("Traceback", "never retrieved", "was destroyed"):
            assert sign not in log, log


@pytest.fixture
def otlp() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


async def test_load_is_a_root_span_linked_with_its_waiting_requests(site: Site, otlp: OtlpReceiver) -> None:
    node = await site.node()
    often = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    scheduler = await process(site, "first", THAW_OTLP_ENDPOINT=otlp.grpc_url, THAW_OTLP_PROTOCOL="grpc", **often)
    try:
        await site.add(spec("a"))
        waiters = tuple(f"00-{digit * 32}-{digit * 16}-01" for digit in "ab")
        await site.demand("a", 2, traceparents=waiters)
        load = await asyncio.to_thread(otlp.wait_for, "load a")
        schedule = await asyncio.to_thread(otlp.wait_for, "schedule")
    finally:
        scheduler.terminate()
        await log_of(scheduler)
    assert scheduler.returncode == 0
    assert load.parent_span_id == b""
    assert [link.trace_id.hex() for link in load.links] == ["a" * 32, "b" * 32]
    assert load.trace_id.hex() == (node.starts("a")[0].traceparent or "").split("-")[1]
    attributes = {a.key: a.value.string_value for a in load.attributes}
    assert attributes["gen_ai.request.model"] == "a"
    assert attributes["thaw.outcome"] == "ready"
    assert (schedule.trace_id, schedule.parent_span_id) == (load.trace_id, load.span_id)
    assert {service for service, _ in otlp.spans} == {"thaw-scheduler"}


async def test_leader_that_was_paused_takes_no_node_for_lost(site: Site) -> None:
    """The messages of that time, as of a paused machine, wait when it runs again."""
    node = await site.node(hold_starts=asyncio.Event())
    leader = await process(site, "paused")
    try:
        await begin_start(site)
        leader.send_signal(signal.SIGSTOP)
        await asyncio.sleep(NODE_LOST_AFTER_S + 1)
        leader.send_signal(signal.SIGCONT)
        await end_start(site, node)
    finally:
        leader.kill()
        await log_of(leader)
