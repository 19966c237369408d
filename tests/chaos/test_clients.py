"""Clients that disconnect in each phase, and a client that does not read.

The mesh stops their work, and other clients are not disturbed.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import openai
import psutil
import pytest

from tests.support.launcher import until
from tests.support.mesh import LOADER, Victim, held
from tests.support.outcomes import Asked, ask
from tests.support.paced_zygote import Pace
from tests.support.raw import RawClient


def load_of(mesh: Victim, model: str) -> tuple[int, int, int]:
    """Return the engine's running and waiting requests, and all tokens it generated."""
    load = mesh.instance(model)["load"]
    return load["active"], load["waiting"], load["generated_tokens"]


def idle(mesh: Victim, model: str) -> bool:
    return load_of(mesh, model)[:2] == (0, 0)


def in_gateway(mesh: Victim, model: str) -> tuple[int, int]:
    """Return the model's requests that an engine has, and those queued in the gateway."""
    text = httpx.get(f"{mesh.url}/metrics", timeout=120).text

    def shown(name: str) -> int:
        found = re.search(rf'^{name}{{gen_ai_request_model="{model}"}} (\S+)$', text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    return shown("thaw_requests_in_flight"), shown("thaw_queue_length")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_client_disconnect_during_generation_stops_the_engine(
    mesh: Victim, client: openai.OpenAI, pace: Pace, stream: bool
) -> None:
    ask(client)
    until(lambda: idle(mesh, "one"), what="the engine is idle")
    before = load_of(mesh, "one")[2]
    with held(mesh.engine("one")):
        pass
    with pace.slowed():  # the responses are still running when the client disconnects
        leaver = RawClient(mesh.port, "one", stream=stream, n=16)
        if stream:
            assert leaver.read()
        else:
            until(lambda: load_of(mesh, "one")[0] > 0, what="it is generating")
        leaver.leave()
        until(lambda: idle(mesh, "one"), what="the engine has stopped")
    assert load_of(mesh, "one")[2] - before < 16 * 900


def test_leaving_before_the_first_token_stops_the_engine(mesh: Victim, client: openai.OpenAI, pace: Pace) -> None:
    ask(client)
    until(lambda: idle(mesh, "one"), what="the engine is idle")
    before = load_of(mesh, "one")[2]
    with pace.slowed():  # the cancellation may arrive seconds after the request
        with held(mesh.engine("one")):  # the engine has not read the request yet
            leaver = RawClient(mesh.port, "one", stream=True)
            until(lambda: in_gateway(mesh, "one") == (1, 0), what="the gateway has sent the request")
            leaver.leave()
            until(lambda: in_gateway(mesh, "one") == (0, 0), what="the gateway has sent the cancellation")
        assert ask(client)
        until(lambda: idle(mesh, "one"), what="the engine has stopped")
    assert load_of(mesh, "one")[2] - before < 100


def test_a_load_without_waiters_is_cancelled(mesh: Victim, client: openai.OpenAI) -> None:
    mesh.make_cold("one")
    with held(mesh.pid(LOADER)):
        leavers = [RawClient(mesh.port, "one", stream=stream) for stream in (True, False)]
        mesh.await_starting("one")
        for leaver in leavers:
            leaver.leave()
        until(lambda: mesh.starting("one") is None, what="the start is called off")
    until(lambda: mesh.shared_bytes() == 0 or mesh.live() != [], what="its segment is gone")
    assert mesh.instances("one") == []
    # Plans are written behind the decision.
    until(lambda: mesh.json("explain", "one")["outcome"] != "pending", what="the plan's outcome is written")
    assert mesh.json("explain", "one")["outcome"] == "cancelled"
    assert ask(client)


def test_a_load_with_another_waiter_continues(mesh: Victim, client: openai.OpenAI) -> None:
    mesh.make_cold("one")
    before = mesh.engine_logs()
    with held(mesh.pid(LOADER)):
        leaver = RawClient(mesh.port, "one", stream=True)
        stays = Asked(mesh.url, "one", tokens=8)
        mesh.await_starting("one")
        leaver.leave()
    assert stays.outcome().kind == "answered"
    assert len(mesh.engine_logs() - before) == 1


def test_disconnect_of_a_queued_client_does_not_affect_the_others(mesh: Victim, client: openai.OpenAI, pace: Pace) -> None:
    """A client that leaves the queue of a busy model does not affect the others.

    The gateway sends the engine twice its capacity of 16, and queues the other requests.
    """
    ask(client)
    until(lambda: idle(mesh, "one"), what="the engine is idle")
    before = load_of(mesh, "one")[2]
    with pace.slowed():  # the cancellations may arrive seconds after the requests
        with held(mesh.engine("one")), ExitStack() as leaving:
            for _ in range(40):
                leaver = RawClient(mesh.port, "one", stream=True, tokens=500)
                leaving.callback(leaver.leave)
            until(lambda: in_gateway(mesh, "one") == (32, 8), what="the leavers' requests are there")
            stays = Asked(mesh.url, "one", tokens=8)
            until(lambda: in_gateway(mesh, "one") == (32, 9), what="the other one waits behind them")
            leaving.close()
            until(lambda: in_gateway(mesh, "one") == (1, 0), what="only the other one is left")
        assert stays.outcome().kind == "answered"
        until(lambda: idle(mesh, "one"), what="the engine has stopped")
    assert load_of(mesh, "one")[2] - before < 40 * 500 / 4


def test_client_that_does_not_read_does_not_affect_others(mesh: Victim, client: openai.OpenAI) -> None:
    expected = ask(client, tokens=50)
    gateway = psutil.Process(mesh.pid("gateway"))
    before = gateway.memory_info().rss
    # A token with its logprobs takes some kilobytes, so the response exceeds the socket buffers.
    slow = [
        RawClient(mesh.port, "one", receive_buffer=4096, stream=True, logprobs=True, top_logprobs=20, temperature=0)
        for _ in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: ask(client, tokens=50), range(8))) == {expected}
    until(lambda: idle(mesh, "one"), what="the engine is done with the slow clients")
    assert gateway.memory_info().rss - before < 100 << 20
    for late in slow:
        end = late.read_all()
        late.leave()
        assert b"data: [DONE]" in end[-200:] or b'"error"' in end[-2000:]
    assert ask(client, tokens=50) == expected
