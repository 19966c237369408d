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
from services.gateway.http.parsing.request_parser import ParsedRequest
from shared.contracts.openai import ChatCompletionRequest
from shared.errors import InvalidRequest, PayloadTooLarge, Unavailable

TEXT = "é" * LARGE_BYTES


def chat(content: object = TEXT) -> bytes:
    return json.dumps({"model": "one", "messages": [{"role": "user", "content": content}], "seed": 7}).encode()


async def ask(parsers: ParserProcess, body: bytes) -> ParsedRequest:
    return await parsers.parse("chat", body, "/v1/chat/completions", "", {"content-type": "application/json"})


async def ready(parsers: ParserProcess) -> int:
    """Return the worker's pid, after a large body has started it."""
    await ask(parsers, chat())
    async with asyncio.timeout(60):
        while parsers.pid is None:  # noqa: ASYNC110 - a process starts
            await asyncio.sleep(0.01)
    return parsers.pid


@pytest.fixture
async def parsers() -> AsyncIterator[ParserProcess]:
    found = ParserProcess(max_values=1_000_000)
    yield found
    await found.close()


async def test_a_small_body_starts_nothing(parsers: ParserProcess) -> None:
    assert (await ask(parsers, chat("hello"))).request.model == "one"
    assert parsers.pid is None
    assert parsers._starting is None


async def test_a_large_body_is_the_same_from_either_process(parsers: ParserProcess) -> None:
    here = await ask(parsers, chat())  # while the worker starts
    pid = await ready(parsers)
    there = await ask(parsers, chat())
    assert there == here
    assert isinstance(there.request, ChatCompletionRequest)
    assert there.request.messages[0].content == TEXT
    assert there.engine_request.body == chat()
    assert psutil.Process(pid).cpu_times().user > 0
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
    with pytest.raises(PayloadTooLarge):
        await ask(parsers, b"[" * 1_000_000)


async def test_a_worker_that_is_killed_is_replaced(parsers: ParserProcess) -> None:
    pid = await ready(parsers)
    worker = psutil.Process(pid)
    worker.suspend()
    under_way = [asyncio.create_task(ask(parsers, chat())) for _ in range(2)]
    async with asyncio.timeout(20):
        while not parsers._turn.locked():  # noqa: ASYNC110 - the first one is with the worker
            await asyncio.sleep(0)
    worker.kill()
    for task in under_way:
        with pytest.raises(Unavailable, match="Repeat the request"):
            await task
    assert await ready(parsers) != pid


async def test_a_client_that_leaves_spoils_no_other_body(parsers: ParserProcess) -> None:
    pid = await ready(parsers)
    psutil.Process(pid).suspend()
    leaving = asyncio.create_task(ask(parsers, chat("a" * LARGE_BYTES)))
    async with asyncio.timeout(20):
        while not parsers._turn.locked():  # noqa: ASYNC110 - it is with the worker
            await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert (await ask(parsers, chat())).engine_request.body == chat()
    await ready(parsers)
    parsed = await ask(parsers, chat("b" * LARGE_BYTES))
    assert isinstance(parsed.request, ChatCompletionRequest)
    assert parsed.request.messages[0].content == "b" * LARGE_BYTES


async def test_a_worker_that_does_not_start_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_process, "parser_module", lambda: "no.such.module")
    parsers = ParserProcess(max_values=1_000_000)
    try:
        for _ in range(2):
            assert (await ask(parsers, chat())).request.model == "one"
            assert parsers._starting is not None
            await asyncio.wait_for(parsers._starting, 30)
            assert parsers.pid is None
    finally:
        await parsers.close()


async def test_it_ends_when_idle_and_with_its_gateway() -> None:
    parsers = ParserProcess(max_values=1_000_000, idle_s=0.05)
    try:
        worker = parsers._worker
        await ask(parsers, chat())
        assert parsers._starting is not None
        await parsers._starting
        worker = parsers._worker
        assert worker is not None
        assert await asyncio.wait_for(worker.wait(), 30) == 0
        assert (await ask(parsers, chat())).request.model == "one"
    finally:
        await parsers.close()


async def test_it_survives_the_terminals_interrupt(parsers: ParserProcess) -> None:
    pid = await ready(parsers)
    os.kill(pid, signal.SIGINT)
    assert (await ask(parsers, chat())).request.model == "one"
    assert parsers.pid == pid
