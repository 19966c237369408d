"""Requests for models that are not ready.

Queues, demand, waking comments, failures, and engines that refuse or die.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial

from services.gateway.domain.failover import MAX_MESSAGE_LOSSES
from services.gateway.http.responses.event_stream import DONE
from shared.contracts.demand import Demand
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.traces import RequestTrace, TracePage
from shared.errors import CheckpointInvalid, EngineFailed, InsufficientMemory
from tests.integration.gateway.conftest import Served, ServeFn, chat, until, until_listed
from tests.integration.gateway.queues import queued
from tests.support.fake_engine import WORDS, FakeNode, Run, card_of, drain
from tests.support.nats_accounts import NatsAccount

TEXT = "".join(WORDS)
URL = "/v1/chat/completions"


async def test_hundred_requests_wake_one_model(gateway: Served, node: FakeNode) -> None:
    waiting = [asyncio.create_task(gateway.http.post(URL, json=chat())) for _ in range(100)]
    await node.until_demand(lambda: node.demand[-1:] != [] and node.demand[-1].waiting == 100)
    assert len(node.demand) < 20  # the dispatcher's own test counts exactly; here a slow machine only adds seconds
    await node.engine("alpha")
    answers = await asyncio.gather(*waiting)
    assert {a.status_code for a in answers} == {200}
    assert {a.json()["choices"][0]["message"]["content"] for a in answers} == {TEXT}
    await node.until_demand(lambda: node.demand[-1].waiting == 0)
    assert len({a.headers["x-request-id"] for a in answers}) == 100


async def test_a_full_queue_refuses_with_a_time_to_retry(gateway: Served, node: FakeNode) -> None:
    waiting = [asyncio.create_task(gateway.http.post(URL, json=chat("beta"))) for _ in range(2)]
    await node.until_demand(lambda: any(d.model == "beta" for d in node.demand))
    await until(lambda: queued(gateway, "beta", 2))
    refused = await gateway.http.post(URL, json=chat("beta"))
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    assert "number 3" in refused.json()["error"]["message"]
    assert refused.headers["x-thaw-queue-position"] == "3"
    await node.engine("beta")
    assert [a.status_code for a in await asyncio.gather(*waiting)] == [200, 200]


async def test_the_queues_time_out_is_not_to_be_retried(gateway: Served) -> None:
    answer = await gateway.http.post(URL, json=chat("hasty"))
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "queue_timeout"
    assert answer.headers["x-should-retry"] == "false"


async def test_a_failed_load_fails_every_waiting_request(gateway: Served, node: FakeNode) -> None:
    waiting = [asyncio.create_task(gateway.http.post(URL, json=chat(stream=i % 2 == 0))) for i in range(4)]
    await node.until_demand(lambda: node.demand[-1:] != [] and node.demand[-1].waiting == 4)
    await node.load_failed("alpha", CheckpointInvalid("shard 2 of 3 is truncated"))
    for answer in await asyncio.gather(*waiting):
        assert answer.status_code == 422
        assert answer.json()["error"] == {
            "message": "shard 2 of 3 is truncated",
            "type": "invalid_request_error",
            "param": None,
            "code": "checkpoint_invalid",
        }


async def test_model_that_can_never_fit_fails_immediately(gateway: Served, node: FakeNode) -> None:
    async def impossible(demand: Demand) -> None:
        raise InsufficientMemory("alpha needs 9 GB and no device has more than 4")

    node.on_demand = impossible  # type: ignore[assignment]  # it never answers, so that it has no type of answer
    answer = await gateway.http.post(URL, json=chat())
    assert answer.status_code == 503
    assert answer.headers["x-should-retry"] == "false"


async def test_waking_stream_sends_progress_comments_and_then_the_response(node: FakeNode, serve: ServeFn) -> None:
    async def ignoring(run: Run) -> None:
        await run.start(ignored=("shoe_size",))
        await run.text("Hello")
        await run.finish(1)

    async with serve(waking_comment_after=0.2, waking_comment_interval=0.1) as gateway:
        await until_listed(gateway, (card_of("alpha"),))
        starting = await node.engine("alpha", ignoring, ready=False)
        async with gateway.http.stream("POST", URL, json=chat(stream=True)) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            comments = [await anext(lines), await anext(lines), await anext(lines)]
            assert comments[0].startswith(": waking alpha, phase=load, progress=50%, eta=")
            starting.state = InstanceState.READY
            await node.announce()
            rest = [line async for line in lines]
        assert rest[-2:] == [DONE.decode().strip(), ""]
        assert rest[-4].startswith(": timing ")
        assert "prefill;dur=" in rest[-4]
        assert rest[-6] == ": x-thaw-ignored shoe_size", "the headers had gone"


async def test_a_failure_after_the_first_comment_is_an_event(node: FakeNode, serve: ServeFn) -> None:
    async with serve(waking_comment_after=0.2) as gateway:
        await until_listed(gateway, (card_of("alpha"),))
        async with gateway.http.stream("POST", URL, json=chat(stream=True)) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith(": waking alpha")
            await node.load_failed("alpha", EngineFailed("it ran out of luck"))
            rest = [line async for line in lines if line]
        assert len(rest) == 1
        assert json.loads(rest[0].removeprefix("data: "))["error"]["code"] == "engine_failed"


async def test_cancelled_queued_request_ends_the_demand(gateway: Served, node: FakeNode) -> None:
    waiting = asyncio.create_task(gateway.http.post(URL, json=chat()))
    await node.until_demand(lambda: node.demand[-1:] != [] and node.demand[-1].waiting == 1)
    waiting.cancel()
    await node.until_demand(lambda: node.demand[-1].waiting == 0)


async def test_a_missing_responder_is_hidden_from_the_client(gateway: Served, node: FakeNode) -> None:
    ghost = await node.engine("alpha")
    await ghost.vanish()
    waiting = asyncio.create_task(gateway.http.post(URL, json=chat()))
    await node.until_demand(lambda: node.demand[-1:] != [] and node.demand[-1].waiting == 1)
    del node.engines[ghost.id]
    await node.engine("alpha")
    assert (await waiting).status_code == 200


async def test_request_of_a_draining_engine_is_sent_to_another(gateway: Served, node: FakeNode) -> None:
    draining = await node.engine("alpha", drain)
    waiting = asyncio.create_task(gateway.http.post(URL, json=chat()))
    await draining.until(lambda: len(draining.requests) > 0)
    draining.state = InstanceState.DRAINING
    await node.engine("alpha")
    assert (await waiting).json()["choices"][0]["message"]["content"] == TEXT


async def test_stream_that_cannot_be_resumed_ends_with_an_error(gateway: Served, node: FakeNode) -> None:
    async def fixed(run: Run) -> None:
        await run.start(fixed="it has a memory of its own")
        await run.text(WORDS[0])
        await run.cancelled.wait()

    engine = await node.engine("alpha", fixed)
    async with gateway.http.stream("POST", URL, json=chat(stream=True)) as answer:
        lines = answer.aiter_lines()
        seen = [await anext(lines) for _ in range(3)]
        assert WORDS[0] in seen[2]
        await engine.vanish()
        engine.state, engine.error = InstanceState.FAILED, EngineFailed("killed by signal 9").body()
        await node.announce()
        rest = [line async for line in lines if line]
    assert len(rest) == 1
    error = json.loads(rest[0].removeprefix("data: "))["error"]
    assert error["code"] == "engine_failed"
    assert "signal 9" in error["message"]


async def test_engine_that_dies_before_its_first_token_is_replaced(gateway: Served, node: FakeNode) -> None:
    async def silent(run: Run) -> None:
        await run.start()
        await run.cancelled.wait()

    engine = await node.engine("alpha", silent)
    waiting = asyncio.create_task(gateway.http.post(URL, json=chat()))
    await engine.until(lambda: len(engine.requests) == 1)
    await engine.vanish()
    engine.state = InstanceState.FAILED
    await node.announce()
    await node.until_demand(lambda: node.demand[-1:] != [] and node.demand[-1].waiting == 1)
    await node.engine("alpha")
    assert (await waiting).status_code == 200


async def test_lost_messages_are_detected_and_the_request_resent_within_limits(gateway: Served, node: FakeNode) -> None:
    async def gap(run: Run) -> None:
        await run.start()
        run.seq += 1
        await run.text("x")
        await run.finish(1)

    engine = await node.engine("alpha", gap)
    answer = await gateway.http.post(URL, json=chat())
    assert answer.status_code == 500
    assert "were lost" in answer.json()["error"]["message"]
    await engine.until(lambda: len(engine.cancelled) == len(engine.requests) == MAX_MESSAGE_LOSSES + 1)


async def test_critical_path_of_a_cold_request_tiles_its_ttft(gateway: Served, node: FakeNode) -> None:
    starting = await node.engine("alpha", ready=False)
    starting.traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    waiting = asyncio.create_task(gateway.http.post(URL, json=chat(), headers={"x-client-request-id": "cold-1"}))
    await node.until_demand(lambda: node.demand[-1:] != [] and node.demand[-1].waiting == 1)
    starting.phases = (
        PhaseSpan(phase=Phase.SCHEDULE, start_ms=-5000, duration_ms=20),
        PhaseSpan(phase=Phase.LOAD, start_ms=-4980, duration_ms=4979),
        PhaseSpan(phase=Phase.INIT, start_ms=-1, duration_ms=0.5),
    )
    starting.state = InstanceState.READY
    await node.announce()
    answer = await waiting
    assert answer.headers["x-client-request-id"] == "cold-1"
    request_id = answer.headers["x-request-id"]
    assert "load;dur=" in answer.headers["server-timing"]
    await until(lambda: _traced(gateway, request_id))
    for which in (request_id, "last"):
        trace = RequestTrace.model_validate_json((await gateway.http.get(f"/admin/v1/traces/{which}")).content)
        assert trace.cold
        assert trace.load_trace_id == "a" * 32
        assert trace.load_plan_id == "plan-alpha"
        assert trace.ttft_ms is not None
        assert abs(sum(s.duration_ms for s in trace.critical_path) - trace.ttft_ms) < 1e-3
        assert {s.phase for s in trace.critical_path} >= {Phase.LOAD, Phase.INIT}


async def test_stored_traces_are_paginated(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    asked: list[str] = []
    for _ in range(3):
        answer = await gateway.http.post(URL, json=chat())
        assert answer.status_code == 200
        asked.append(answer.headers["x-request-id"])
        await until(partial(_traced, gateway, asked[-1]))
    found: list[str] = []
    begin: int | None = 1
    while begin is not None:
        answer = await gateway.http.get("/admin/v1/traces", params={"from": begin, "limit": 2})
        page = TracePage.model_validate_json(answer.content)
        found += [t.request_id for t in page.traces]
        begin = page.next
    assert [r for r in found if r in asked] == asked
    for route, limit in (("traces", "0"), ("traces", "²"), ("migrations", "²"), ("migrations", "9" * 5_000)):
        assert (await gateway.http.get(f"/admin/v1/{route}", params={"limit": limit})).status_code == 400
    refused = await gateway.http.get("/admin/v1/traces", params={"limit": "0"})
    assert refused.status_code == 400
    assert "limit" in refused.json()["error"]["message"]


async def _traced(gateway: Served, request_id: str) -> bool:
    return (await gateway.http.get(f"/admin/v1/traces/{request_id}")).status_code == 200


async def test_a_late_scheduler_receives_the_demand(serve: ServeFn, own_nats: NatsAccount) -> None:
    node = FakeNode(own_nats.url)
    await node.start(card_of("alpha"), scheduler=False)
    try:
        async with serve() as gateway:
            await until_listed(gateway, (card_of("alpha"),))
            waiting = asyncio.create_task(gateway.http.post(URL, json=chat()))
            await until(lambda: queued(gateway, "alpha", 1))
            late = FakeNode(own_nats.url, "late")
            await late.start()
            await late.until_demand(lambda: len(late.demand) > 0)
            await late.engine("alpha")
            assert (await waiting).status_code == 200
            await late.stop()
    finally:
        await node.stop()
