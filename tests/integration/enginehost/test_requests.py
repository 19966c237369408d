"""Requests through a real host to a real HTTP server, and their responses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import subjects
from shared.contracts.inference import InferData, InferEnd, InferFailed
from tests.support.hosted import HostedAnswer, Hosts, fake_card


async def ready(hosts: Hosts, *options: str, **more: Any) -> str:
    start = hosts.host(fake_card(*options, **more))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    return start.instance_id


async def seen(hosts: Hosts, instance: str) -> Any:
    stream = await hosts.request_route(instance, "/stats", "GET")
    return stream.json


async def test_complete_and_streamed_responses_pass_unchanged(hosts: Hosts) -> None:
    instance = await ready(hosts)
    whole = await hosts.request(instance, "chat", messages=[], max_tokens=3)
    assert whole.status == 200
    assert whole.json["choices"][0]["message"]["content"] == "t0 t1 t2 "
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 3)
    streamed = await hosts.request(instance, "chat", messages=[], max_tokens=5, stream=True, stream_options={"include_usage": True})
    assert streamed.text() == "t0 t1 t2 t3 t4 "
    assert streamed.events()[-1]["usage"]["completion_tokens"] == 5


async def test_usage_that_the_client_did_not_request_is_hidden(hosts: Hosts) -> None:
    instance = await ready(hosts)
    answer = await hosts.request(instance, "completion", prompt="x", max_tokens=4, stream=True)
    assert all("usage" not in e for e in answer.events())
    assert answer.text() == "t0 t1 t2 t3 "
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    report = await hosts.reported(instance, lambda r: r.load.generated_tokens == 4)
    assert report.load.completed == 1


async def test_time_of_the_engine_is_divided_among_its_requests(hosts: Hosts, tmp_path: Path) -> None:
    """The engine sends the rest of both streams once their first messages have arrived."""
    instance, may_continue = await ready(hosts), tmp_path / "may continue"
    fake = {"says": "x" * 30, "pace": 0.01, "hold": {"tokens": 4, "file": str(may_continue)}}
    began = time.monotonic()
    streams = [await hosts.ask(instance, "completion", prompt="x", stream=True, fake=fake) for _ in range(2)]
    for stream in streams:
        await stream.until(lambda r: any(isinstance(x, InferData) for x in r))
    may_continue.touch()
    for stream in streams:
        await stream.until(lambda r: isinstance(r[-1], InferEnd))
    took = time.monotonic() - began
    answers = [HostedAnswer(stream) for stream in streams]
    shares = [a.device_s for a in answers]
    assert all(0 < share < took for share in shares)
    assert 0.2 <= sum(shares) <= took + 1e-3, "both at once take no longer than one"
    firsts = [next(r for r in a.stream.replies if isinstance(r, InferData)).device_s for a in answers]
    assert all(0 < first < share for first, share in zip(firsts, shares, strict=True))
    load = (await hosts.reported(instance, lambda r: r.load.completed == 2)).load
    assert load.charged_s == pytest.approx(sum(shares), abs=1e-4)


async def test_abandoned_work_is_that_of_no_request(hosts: Hosts) -> None:
    instance = await ready(hosts)
    stream = await hosts.ask(instance, "completion", prompt="x", stream=True, fake={"tokens": 10_000, "pace": 0.01})
    await stream.until(lambda replies: len(replies) > 3)
    await hosts.cancel(instance, stream.request_id)
    load = (await hosts.reported(instance, lambda r: not r.load.active and bool(r.load.background))).load
    sent_s = max(r.device_s for r in stream.replies if isinstance(r, InferData))
    (work,) = load.background
    assert work.plan_id == ""
    assert sent_s + work.seconds == pytest.approx(load.busy_s, abs=1e-4)
    assert load.charged_s == pytest.approx(sent_s, abs=1e-4)


async def test_tools_json_mode_and_unknown_fields_reach_the_engine_unchanged(hosts: Hosts) -> None:
    instance = await ready(hosts)
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    asked = {"messages": [], "tools": [tool], "tool_choice": "required", "response_format": {"type": "json_object"}, "odd": [1]}
    answer = await hosts.request(instance, "chat", **asked)
    assert answer.json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    _, path, body = (await seen(hosts, instance))["calls"][-1]
    assert path == "/v1/chat/completions"
    assert {k: body[k] for k in asked} == asked
    assert body["model"] == "demo"


async def test_engine_error_keeps_its_status_and_body(hosts: Hosts) -> None:
    instance = await ready(hosts)
    for status in (400, 422, 429, 503):
        answer = await hosts.request(instance, "chat", messages=[], stream=True, fake={"status": status})
        assert answer.status == status
        assert answer.json == {"error": {"message": "no", "type": "odd", "param": "fake", "code": "own_code"}}
        assert answer.error is None


async def test_error_of_an_engine_that_has_ended_behind_its_server_is_no_answer(hosts: Hosts) -> None:
    """The gateway sends the request to another instance."""
    instance = await ready(hosts)
    answer = await hosts.request(instance, "chat", messages=[], fake={"status": 500, "loses_core": True})
    failed = answer.stream.replies[0]
    assert isinstance(failed, InferFailed)
    assert (failed.error.code, failed.engine_lost) == ("engine_failed", True)
    assert (await hosts.reported(instance, lambda r: r.state == "failed")).error is not None


async def test_a_declared_route_is_passed_with_method_and_body(hosts: Hosts) -> None:
    instance = await ready(hosts, routes=["/v1/rerank"])
    answer = await hosts.request_route(instance, "/v1/rerank", "POST", query="a=b", documents=["x"])
    assert answer.json == {"echo": {"model": "demo", "documents": ["x"]}}
    assert (await seen(hosts, instance))["calls"][-1][1] == "/v1/rerank?a=b"


async def test_a_cancelled_request_stops_the_engine(hosts: Hosts) -> None:
    instance = await ready(hosts)
    stream = await hosts.ask(instance, "chat", messages=[], stream=True, fake={"tokens": 10_000, "pace": 0.01})
    await stream.until(lambda r: any(isinstance(x, InferData) for x in r))
    await hosts.cancel(instance, stream.request_id)
    await hosts.eventually(lambda: seen(hosts, instance), lambda s: s["cancelled"] == 1)
    assert not any(isinstance(r, InferEnd | InferFailed) for r in stream.replies)
    await hosts.reported(instance, lambda r: r.state == "ready" and r.load.active == 0 and r.load.idle_ms > 0)


async def test_request_past_its_deadline_fails_and_stops_the_engine(hosts: Hosts) -> None:
    instance = await ready(hosts)
    answer = await hosts.request(
        instance, "chat", deadline_ms=3_000, messages=[], stream=True, fake={"tokens": 10_000, "pace": 0.01}
    )
    assert answer.error is not None
    assert answer.error.code == "deadline_exceeded"
    await hosts.eventually(lambda: seen(hosts, instance), lambda s: s["cancelled"] == 1)


async def test_a_crash_during_a_response_reaches_the_client_and_the_node(hosts: Hosts) -> None:
    instance = await ready(hosts)
    stream = await hosts.ask(instance, "chat", messages=[], stream=True, fake={"tokens": 10_000, "pace": 0.01})
    await stream.until(lambda r: any(isinstance(x, InferData) for x in r))
    await hosts.ask(instance, "chat", messages=[], fake={"exit": 9})
    await stream.until(lambda r: isinstance(r[-1], InferFailed))
    failed = await hosts.reported(instance, lambda r: r.state == "failed")
    assert failed.error is not None
    assert "ended with exit status 9" in failed.error.message
    assert "exit as requested" in failed.error.message


@pytest.mark.parametrize("what", ["draining", "asleep"])
async def test_host_that_is_not_serving_refuses_immediately(hosts: Hosts, what: str, tmp_path: Path) -> None:
    from shared.contracts.engine import DrainEngine, EngineAsleep, SleepEngine

    instance, may_end = await ready(hosts), tmp_path / "may end"
    control = subjects.engine_control(instance)
    if what == "asleep":
        await hosts.mesh.request(control, SleepEngine(), EngineAsleep)
    else:
        running = await hosts.ask(
            instance, "chat", messages=[], stream=True, fake={"tokens": 10_000, "pace": 0.01, "until": str(may_end)}
        )
        await running.until(lambda r: any(isinstance(x, InferData) for x in r))
        await hosts.mesh.nc.publish(control, DrainEngine().model_dump_json().encode())
        await hosts.reported(instance, lambda r: r.state == "draining")
    answer = await hosts.request(instance, "chat", messages=[])
    assert answer.error is not None
    assert answer.error.code == "instance_draining"
    if what == "draining":
        may_end.touch()
        await running.until(lambda r: isinstance(r[-1], InferEnd))
        await hosts.reported(instance, lambda r: r.state == "stopped")
