"""SIGKILL to each process while the mesh is idle, loads a model, or streams.

`Outcome` classifies what clients receive; after each fault the standard client gets a response.
"""

from __future__ import annotations

from typing import Any

import openai
import psutil
import pytest

from tests.support.launcher import until
from tests.support.mesh import LOADER, NODEAGENT, Victim, held, kill
from tests.support.outcomes import Asked, ask
from tests.support.paced_zygote import Pace
from tests.support.sizes import size

SUPERVISED = ("gateway", "scheduler", NODEAGENT, LOADER)
TOKENS, STEP_S = size((100, 0.2), (200, 0.1))
"""Tokens and step of a stream, which takes 20 s and outlives the killed processes."""


@pytest.fixture(scope="module")
def whole(mesh: Victim) -> str:
    """Return the undisturbed response of `TOKENS` tokens."""
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=90) as client:
        return ask(client, tokens=TOKENS)


@pytest.mark.parametrize("service", SUPERVISED)
def test_sigkill_of_a_service_in_an_idle_mesh_keeps_the_engine(mesh: Victim, client: openai.OpenAI, service: str) -> None:
    expected = ask(client)
    engine = mesh.engine("one")
    old = mesh.kill(service)
    # Do not wait for the restart: the client's own retries must suffice.
    assert ask(client) == expected
    mesh.await_replaced(service, old)
    until(lambda: [i["pids"] for i in mesh.instances("one")] == [[engine]], what="the live engine is kept")
    assert ask(client) == expected


def test_killed_idle_engine_is_replaced(mesh: Victim, client: openai.OpenAI) -> None:
    expected = ask(client)
    old = mesh.engine("one")
    kill(old)
    assert ask(client) == expected
    assert mesh.engine("one") != old


def test_killed_idle_zygote_is_replaced(mesh: Victim, client: openai.OpenAI) -> None:
    """Running engines survive SIGKILL of the zygote; the next start uses a new one."""
    for model in ("two", "three"):  # the device has room for two models: the start of `two` evicts none
        mesh.make_cold(model)
    expected = ask(client)
    engine = mesh.engine("one")
    (zygote,) = mesh.zygotes()
    kill(zygote.pid)
    assert ask(client) == expected
    assert ask(client, "two")
    assert mesh.engine("one") == engine


@pytest.mark.parametrize("service", [*SUPERVISED, "engine"])
def test_sigkill_during_a_load_loses_no_response(mesh: Victim, client: openai.OpenAI, service: str) -> None:
    expected = ask(client, tokens=20)
    mesh.make_cold("one")
    loader = mesh.pid(LOADER)
    with held(loader):
        asked = [Asked(mesh.url, "one", stream=stream, tokens=20) for stream in (True, False)]
        starting = mesh.await_starting("one")
        if service == "engine":
            kill(starting["pids"][0])
        else:
            old = mesh.kill(service)
    for outcome in (a.outcome() for a in asked):
        # The supervisor holds the listener: a connection that the killed gateway had not accepted
        # is answered by the next one.
        if service != "gateway" or outcome.kind != "disconnected":
            assert (outcome.kind, outcome.text) == ("answered", expected)
    assert ask(client, tokens=20) == expected
    if service != "engine":
        mesh.await_replaced(service, old)


@pytest.mark.parametrize("service", SUPERVISED)
def test_sigkill_of_a_service_during_a_stream_does_not_affect_it(
    mesh: Victim, client: openai.OpenAI, pace: Pace, service: str, whole: str
) -> None:
    assert whole.startswith(ask(client))
    engine = mesh.engine("one")
    with pace.slowed(STEP_S):
        asked = Asked(mesh.url, "one", tokens=TOKENS)
        assert asked.begun.wait(120)
        with held(engine):  # the stream cannot end before the service
            old = mesh.kill(service)
    outcome = asked.outcome()
    if service == "gateway":
        assert outcome.kind == "disconnected"
    else:
        assert (outcome.kind, outcome.text, outcome.tokens) == ("answered", whole, TOKENS)
    assert ask(client) == whole[: len(ask(client))]
    mesh.await_replaced(service, old)
    assert psutil.pid_exists(engine)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_killed_engine_is_replaced_and_its_responses_resumed(
    mesh: Victim, client: openai.OpenAI, pace: Pace, stream: bool, whole: str
) -> None:
    """Responses resume on a replacement engine, from the tokens already generated."""
    with pace.slowed(STEP_S):
        first = Asked(mesh.url, "one", tokens=TOKENS)
        other = Asked(mesh.url, "one", stream=stream, tokens=TOKENS)
        assert first.begun.wait(120)
        if stream:
            assert other.begun.wait(120)
        kill(mesh.engine("one"))
    for asked in (first, other):
        outcome = asked.outcome()
        assert (outcome.kind, outcome.text, outcome.finish) == ("answered", whole, "length")
        assert outcome.tokens == TOKENS
    assert ask(client, tokens=TOKENS) == whole


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streaming_engine_with_a_key(mesh: Victim, pace: Pace, temperature: float) -> None:
    """The stream resumes on another engine; a repeated key gets the same response."""
    fields: dict[str, Any] = {"key": f"chaos-{temperature}", "temperature": temperature, "tokens": TOKENS}
    with pace.slowed(STEP_S):
        first = Asked(mesh.url, "one", **fields)
        assert first.begun.wait(120)
        kill(mesh.engine("one"))
    outcome = first.outcome()
    assert (outcome.kind, outcome.tokens) == ("answered", TOKENS)
    assert Asked(mesh.url, "one", **fields).outcome().text == outcome.text
