"""A body that kills the process which parses it costs no other client anything."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import psutil
import pytest

from services.gateway.http.parsing.parser_process import ParserProcess
from services.gateway.http.parsing.parser_worker import Job
from services.gateway.http.parsing.request_parser import ParsedRequest
from shared.contracts.base import ErrorBody
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until_listed
from tests.support.fake_engine import FakeNode
from tests.support.stopping import stop

URL = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
SLOW = b'{"model":"alpha","prompt":[' + b"[1]," * 200_000 + b"[1]]}"
LARGE = chat(user="x" * 100_000)


def workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        try:
            if any("parser_worker" in part for part in child.cmdline()):
                found.append(child)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


async def send_slow(gateway: Served) -> httpx.Response:
    return await gateway.http.post("/v1/completions", content=SLOW, headers=JSON, timeout=60)


@pytest.fixture
def with_worker(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[bytes]:
    """Receive each body as the gateway gives it to its worker."""
    bodies = asyncio.Queue[bytes]()
    exchange = ParserProcess._exchange

    async def observed(self: ParserProcess, worker: asyncio.subprocess.Process, job: Job) -> ParsedRequest | ErrorBody:
        bodies.put_nowait(job.body)
        return await exchange(self, worker, job)

    monkeypatch.setattr(ParserProcess, "_exchange", observed)
    return bodies


async def test_killed_parser_fails_only_one_request(node: FakeNode, serve: ServeFn, with_worker: asyncio.Queue[bytes]) -> None:
    await node.engine("alpha")
    async with serve(max_body_values=1_000_000_000, max_prompts=1) as gateway:
        await until_listed(gateway, CARDS)
        assert (await gateway.http.post(URL, json=LARGE)).status_code == 200
        await with_worker.get()
        (worker,) = workers()
        stop(worker.pid)  # it cannot finish the next body
        killed = asyncio.create_task(send_slow(gateway))
        async with asyncio.timeout(60):
            assert await with_worker.get() == SLOW
        queued = asyncio.create_task(gateway.http.post(URL, json=LARGE, timeout=60))
        small = await gateway.http.post(URL, json=chat())
        os.kill(worker.pid, signal.SIGKILL)
        answer = await killed
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "Repeat the request" in answer.json()["error"]["message"]
        assert (await queued).status_code == small.status_code == 200
        assert [w.pid for w in workers()] != [worker.pid], "another worker"
        again = await send_slow(gateway)
        assert again.status_code in (400, 413), again.text
