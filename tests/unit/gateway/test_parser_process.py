"""A worker process parses large bodies.

Each body gets its request or its error, even if the worker fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator

import psutil
import pytest

from services.gateway.http.parsing import parser_process
from services.gateway.http.parsing.parser_process import LARGE_BYTES, ParserProcess
from services.gateway.http.parsing.request_parser import BodyLimits, ParsedRequest, parse_body
from shared.contracts.openai import ChatCompletionRequest
from shared.errors import DeadlineExceeded, InvalidRequest, PayloadTooLarge, Unavailable
from tests.support.stopping import stop

TEXT = "é" * LARGE_BYTES


def chat(content: object = TEXT) -> bytes:
    return json.dumps({"model": "one", "messages": [{"role": "user", "content": content}], "seed": 7}).encode()


async def ask(parsers: ParserProcess, body: bytes) -> ParsedRequest:
    return await parsers.parse("chat", body, "/v1/chat/completions", "", {"content-type": "application/json"})


async def ready(parsers: ParserProcess) -> int:
    """Return the worker's pid, after a large body has started it."""
    await ask(parsers, chat())
    assert parsers.pid is not None
    return parsers.pid


async def parsing(parsers: ParserProcess, body: bytes) -> asyncio.Task[ParsedRequest]:
    """Give a body to the worker, which is stopped and cannot finish it."""
    assert parsers.pid is not None
    stop(parsers.pid)
    task = asyncio.create_task(ask(parsers, body))
    async with asyncio.timeout(60):
        while not parsers._turn.locked():  # noqa: ASYNC110 - the worker has the body
            await asyncio.sleep(0)
    return task


@pytest.fixture
def not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the gateway parses a large body itself."""

    async def refuse(endpoint: str, body: bytes, *_: object) -> ParsedRequest:
        raise AssertionError(f"the gateway parses {len(body)} bytes")

    monkeypatch.setattr(parser_process, "parse_body", refuse)


@pytest.fixture
async def parsers() -> AsyncIterator[ParserProcess]:
    found = ParserProcess(BodyLimits(1_000_000_000))
    yield found
    await found.close()


async def test_small_body_starts_no_worker(parsers: ParserProcess) -> None:
    assert (await ask(parsers, chat("hello"))).request.model == "one"
    assert parsers.pid is None


@pytest.mark.usefixtures("not_here")
async def test_a_large_body_is_the_same_from_either_process(parsers: ParserProcess) -> None:
    here = await parse_body("chat", chat(), BodyLimits(1_000_000), "/v1/chat/completions", "", {"content-type": "application/json"})
    pid = await ready(parsers)
    there = await ask(parsers, chat())
    assert there == here
    assert isinstance(there.request, ChatCompletionRequest)
    assert there.request.messages[0].content == TEXT
    assert there.engine_request.body == chat()
    assert parsers.pid == pid


async def test_errors_are_the_same_from_either_process(parsers: ParserProcess) -> None:
    await ready(parsers)
    wrong = chat([{"type": "text"}] * 100 + [TEXT])
    small = b'{"model":"one","messages":[{"role":"user","content":["x"]}]}'
    errors = []
    for body in (wrong, small):
        with pytest.raises(InvalidRequest) as caught:
            await ask(parsers, body)
        errors.append(caught.value)
    assert errors[0].param == "messages[0].content[100]"
    assert errors[1].param == "messages[0].content[0]"
    parsers._limits = BodyLimits(1_000_000)
    with pytest.raises(PayloadTooLarge):
        await ask(parsers, b"[" * 1_000_000)


@pytest.mark.usefixtures("not_here")
async def test_killed_worker_fails_only_the_body_it_was_parsing(parsers: ParserProcess) -> None:
    pid = await ready(parsers)
    killed = await parsing(parsers, chat())
    queued = [asyncio.create_task(ask(parsers, chat(str(n) * LARGE_BYTES))) for n in range(3)]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="Repeat the request"):
        await killed
    for number, task in enumerate(queued):
        assert (await task).engine_request.body == chat(str(number) * LARGE_BYTES)
    assert await ready(parsers) != pid


@pytest.mark.usefixtures("not_here")
async def test_slow_body_fails_alone(parsers: ParserProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = await ready(parsers)
    monkeypatch.setattr(parser_process, "_JOB_S", 0.5)
    hung = await parsing(parsers, chat("a" * LARGE_BYTES))
    queued = asyncio.create_task(ask(parsers, chat()))
    with pytest.raises(DeadlineExceeded, match="smaller") as caught:
        await hung
    assert caught.value.should_retry is False
    monkeypatch.setattr(parser_process, "_JOB_S", 30.0)
    assert (await queued).engine_request.body == chat()
    assert not psutil.pid_exists(pid)


async def test_a_body_survives_a_pause_of_the_machine(parsers: ParserProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = await ready(parsers)
    waiting = await parsing(parsers, chat())
    loop, pause_s = asyncio.get_running_loop(), 3600.0
    read_clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: read_clock() + pause_s)
    for _ in range(5):  # timers that have become due run
        await asyncio.sleep(0)
    assert not waiting.done()
    os.kill(pid, signal.SIGCONT)
    assert (await waiting).engine_request.body == chat()
    assert parsers.pid == pid


async def test_after_a_crash_no_large_body_is_parsed_here(parsers: ParserProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = await ready(parsers)
    killed = await parsing(parsers, chat())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable):
        await killed
    with monkeypatch.context() as patch:
        patch.setattr(parser_process, "parser_module", lambda: "no.such.module")
        with pytest.raises(Unavailable, match="cannot be started"):
            await ask(parsers, chat())
    assert (await ask(parsers, chat())).request.model == "one"


async def test_cancelled_request_does_not_affect_other_bodies(parsers: ParserProcess) -> None:
    pid = await ready(parsers)
    leaving = await parsing(parsers, chat("a" * LARGE_BYTES))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert await ready(parsers) != pid
    parsed = await ask(parsers, chat("b" * LARGE_BYTES))
    assert isinstance(parsed.request, ChatCompletionRequest)
    assert parsed.request.messages[0].content == "b" * LARGE_BYTES


async def test_a_body_with_too_many_prompts_is_refused_in_the_worker(parsers: ParserProcess, not_here: None) -> None:
    """The gateway does not receive the prompts: reading them would block it."""
    body = json.dumps({"model": "one", "prompt": ["word"] * LARGE_BYTES}).encode()
    with pytest.raises(InvalidRequest, match="65536 prompts, and the limit is 2048"):
        await parsers.parse("completion", body, "/v1/completions", "", {"content-type": "application/json"})
    assert parsers.pid is not None


async def test_gateway_parses_bodies_itself_if_the_worker_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_process, "parser_module", lambda: "no.such.module")
    parsers = ParserProcess(BodyLimits(1_000_000))
    try:
        for _ in range(2):
            assert (await ask(parsers, chat())).request.model == "one"
            assert parsers.pid is None
    finally:
        await parsers.close()


async def test_worker_exits_when_idle_or_when_its_gateway_closes() -> None:
    parsers = ParserProcess(BodyLimits(1_000_000), idle_s=0.05)
    try:
        await ask(parsers, chat())
        worker = parsers._worker
        assert worker is not None
        assert await asyncio.wait_for(worker.wait(), 60) == 0
        assert (await ask(parsers, chat())).request.model == "one"
    finally:
        await parsers.close()


async def test_worker_ignores_sigint(parsers: ParserProcess) -> None:
    pid = await ready(parsers)
    os.kill(pid, signal.SIGINT)
    assert (await ask(parsers, chat())).request.model == "one"
    assert parsers.pid == pid
