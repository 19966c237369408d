"""NATS and PostgreSQL are killed and restarted: idle, in a cold start, in streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import openai
import psutil
import pytest

from tests.support.launcher import until
from tests.support.mesh import LOADER, NODEAGENT, Victim, held
from tests.support.outcomes import Asked, ask
from tests.support.paced_zygote import Pace
from tests.support.sizes import size

SERVERS = ("nats", "postgres")
SERVICES = ("gateway", "scheduler", NODEAGENT, LOADER)
TOKENS, STEP_S = size((100, 0.045), (300, 0.015))
"""A stream takes at least 4.5 s while its engine is slowed down: it outlives a server by far."""


@pytest.fixture(autouse=True)
def no_other_process_ends(mesh: Victim) -> Iterator[None]:
    """Check that no service ends, and that the supervisor restarts none."""
    before = {s: mesh.pid(s) for s in SERVICES}
    yield
    assert {s: mesh.pid(s) for s in SERVICES} == before


@pytest.mark.parametrize("server", SERVERS)
def test_sigkill_of_a_server_in_an_idle_mesh_keeps_the_engine(mesh: Victim, client: openai.OpenAI, server: str) -> None:
    mesh.make_cold("three")  # the device has room for two models: the start of `two` evicts none
    expected = ask(client)
    engine = mesh.engine("one")
    old = mesh.kill(server)
    assert ask(client) == expected
    mesh.await_replaced(server, old)
    # These need the server again: one persists a decision, the other changes the catalogue.
    mesh.make_cold("two")
    assert ask(client, "two")
    assert mesh.plan("two")["outcome"] == "ready"
    assert mesh.engine("one") == engine


@pytest.mark.parametrize("phase", ["deciding", "loading"])
@pytest.mark.parametrize("server", SERVERS)
def test_sigkill_of_a_server_during_a_cold_start_loses_no_response(
    mesh: Victim, client: openai.OpenAI, server: str, phase: str
) -> None:
    expected = ask(client, tokens=20)
    mesh.make_cold("one")
    if phase == "loading":
        with held(mesh.pid(LOADER)):
            asked = [Asked(mesh.url, "one", stream=stream, tokens=20) for stream in (True, False)]
            until(lambda: mesh.starting("one") is not None, what="an engine waits for its weights")
            old = mesh.kill(server)
    else:
        old = mesh.kill(server)
        asked = [Asked(mesh.url, "one", stream=stream, tokens=20) for stream in (True, False)]
    for outcome in (a.outcome() for a in asked):
        assert (outcome.kind, outcome.text) == ("answered", expected)
    mesh.await_replaced(server, old)
    assert ask(client, tokens=20) == expected


def test_streams_do_not_notice_postgres(mesh: Victim, client: openai.OpenAI, pace: Pace) -> None:
    whole = ask(client, tokens=TOKENS)
    with pace.slowed(STEP_S):
        asked = [Asked(mesh.url, "one", stream=stream, tokens=TOKENS) for stream in (True, True, False)]
        assert asked[0].begun.wait(120)
        old = mesh.kill("postgres")
        outcomes = [a.outcome() for a in asked]
    for outcome in outcomes:
        assert (outcome.kind, outcome.text, outcome.tokens) == ("answered", whole, TOKENS)
    mesh.await_replaced("postgres", old)


def test_responses_are_complete_after_a_nats_restart(mesh: Victim, client: openai.OpenAI, pace: Pace) -> None:
    whole = ask(client, tokens=TOKENS)
    with pace.slowed(STEP_S):
        streams = [Asked(mesh.url, "one", tokens=TOKENS) for _ in range(4)]
        answer = Asked(mesh.url, "one", stream=False, tokens=TOKENS)
        assert all(a.begun.wait(120) for a in streams)
        old = mesh.kill("nats")
        outcomes = [a.outcome() for a in (*streams, answer)]
    for outcome in outcomes:
        assert (outcome.kind, outcome.text, outcome.tokens) == ("answered", whole, TOKENS)
    mesh.await_replaced("nats", old)
    assert ask(client, tokens=TOKENS) == whole


def test_lost_final_message_is_detected_and_the_stream_resumed(mesh: Victim, client: openai.OpenAI, pace: Pace) -> None:
    """Streams resume if the engine's last messages are lost with NATS.

    No later message shows the gap; the gateway resumes from the tokens received. A repetition of
    the request, also under its Idempotency-Key, gets the same response.
    """
    whole = ask(client, tokens=TOKENS)
    engine = psutil.Process(mesh.engine("one"))
    keys = ("", "an-end-that-was-lost")
    with contextlib.ExitStack() as silent:
        with pace.slowed(0.3):  # no stream ends before NATS is silent
            streams = [Asked(mesh.url, "one", tokens=TOKENS, key=key) for key in keys]
            assert all(s.begun.wait(120) for s in streams)
            silent.enter_context(held(mesh.pid("nats")))
        until(lambda: engine.cpu_percent(0.3) < 5, what="the engine has sent everything")
        old = mesh.kill("nats")
    for outcome in (s.outcome() for s in streams):
        assert (outcome.kind, outcome.text, outcome.tokens) == ("answered", whole, TOKENS)
    mesh.await_replaced("nats", old)
    for again in (Asked(mesh.url, "one", tokens=TOKENS, key=key).outcome() for key in keys):
        assert (again.kind, again.text, again.tokens) == ("answered", whole, TOKENS)
