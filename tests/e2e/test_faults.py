"""SIGKILL of one process at a time, and the effect on the client."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.batches import lines, results, start, wait
from tests.e2e.chats import QUESTION, ask, stream
from tests.support.launcher import Thaw, until
from tests.support.paced_zygote import Pace
from tests.support.sizes import size
from thaw.demo.models import make_demo_model

PACED = True
BATCH, BATCH_TOKENS = 100, size(12, 32)
BATCH_STEP_S = 0.2
"""Step of a batch that still runs when the test has seen three results: it takes 15 s so."""


def kill(pid: int) -> None:
    process = psutil.Process(pid)
    process.kill()
    psutil.wait_procs([process], timeout=120)


def engine_pid(mesh: Thaw, model: str) -> int:
    return int(mesh.instance(model)["pids"][0])


def restarted(mesh: Thaw, service: str, old: int) -> bool:
    try:
        return mesh.pid(service) != old
    except (KeyError, TypeError):
        return False


def test_the_warm_path_does_not_notice_the_scheduler(mesh: Thaw, plain: openai.OpenAI) -> None:
    expected = ask(plain, "one")
    old = mesh.pid("scheduler")
    kill(old)
    assert ask(plain, "one") == expected
    until(lambda: restarted(mesh, "scheduler", old), what="the scheduler is restarted")
    # A request for a cold model waits during the leader change: the gateway repeats demand until a
    # leader receives it.
    assert ask(plain, "two")


def test_request_that_wakes_a_model_survives_the_scheduler(mesh: Thaw, plain: openai.OpenAI) -> None:
    mesh.json("sleep", "two")
    answers: list[str] = []
    waiter = threading.Thread(target=lambda: answers.append(ask(plain, "two")))
    old = mesh.pid("scheduler")
    waiter.start()
    kill(old)
    waiter.join(150)
    assert len(answers) == 1


def test_engines_survive_their_nodeagent_and_are_adopted(mesh: Thaw, plain: openai.OpenAI) -> None:
    expected = ask(plain, "one")
    engine, old = engine_pid(mesh, "one"), mesh.pid("nodeagent.node-0")
    kill(old)
    assert psutil.pid_exists(engine)
    assert ask(plain, "one") == expected
    until(lambda: restarted(mesh, "nodeagent.node-0", old), what="the nodeagent is restarted")
    until(lambda: [int(i["pids"][0]) for i in mesh.instances("one")] == [engine], what="the engine is adopted")
    assert ask(plain, "one") == expected


def test_a_stream_outlives_the_nodeagent(mesh: Thaw, plain: openai.OpenAI) -> None:
    whole = stream(plain, "one", 200)
    chunks = plain.chat.completions.create(model="one", messages=QUESTION, max_tokens=200, temperature=0, stream=True)
    pieces = [next(chunks).choices[0].delta.content or ""]
    old = mesh.pid("nodeagent.node-0")
    kill(old)
    pieces += [c.delta.content or "" for chunk in chunks for c in chunk.choices]
    assert "".join(pieces) == whole[0]
    until(lambda: restarted(mesh, "nodeagent.node-0", old), what="the nodeagent is restarted")


def test_killed_idle_engine_is_replaced_by_the_next_request(mesh: Thaw, plain: openai.OpenAI) -> None:
    expected = ask(plain, "one")
    engine = engine_pid(mesh, "one")
    kill(engine)
    assert ask(plain, "one") == expected
    assert engine_pid(mesh, "one") != engine


def test_stream_whose_engine_dies_resumes_on_another(mesh: Thaw, pace: Pace, plain: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "one",
        "messages": QUESTION,
        "max_tokens": 300,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = plain.chat.completions.create(**asked).choices[0].message.content
    with pace.slowed():
        chunks = plain.chat.completions.create(**asked, stream=True)
        pieces = [next(chunks).choices[0].delta.content or ""]
        kill(engine_pid(mesh, "one"))
    pieces += [c.delta.content or "" for chunk in chunks for c in chunk.choices]
    assert "".join(pieces) == whole


def test_the_gateway_is_restarted(mesh: Thaw, client: openai.OpenAI) -> None:
    expected = ask(client, "one")
    old = mesh.pid("gateway")
    kill(old)
    until(lambda: restarted(mesh, "gateway", old), what="the gateway is restarted")
    until(lambda: _ready(mesh), what="the gateway is ready")
    assert ask(client, "one") == expected


def _ready(mesh: Thaw) -> bool:
    try:
        return httpx.get(f"{mesh.url}/ready", timeout=30, verify=False).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("service", ["nats", "postgres", "loader.node-0"])
def test_servers_and_loader_are_restarted(mesh: Thaw, client: openai.OpenAI, service: str) -> None:
    old = mesh.pid(service)
    kill(old)
    until(lambda: restarted(mesh, service, old), what=f"{service} is restarted")
    until(lambda: _ready(mesh), what="the gateway is ready")
    mesh.json("sleep", "one")
    assert ask(client, "one")


@pytest.mark.parametrize("victim", ["scheduler", "nodeagent.node-0", "engine", "gateway"])
def test_batch_has_one_result_for_each_request_when_a_process_is_killed(
    mesh: Thaw, pace: Pace, client: openai.OpenAI, victim: str
) -> None:
    patient = client.with_options(max_retries=20)
    asked = lines(BATCH, max_tokens=BATCH_TOKENS)
    with pace.slowed(BATCH_STEP_S):
        begun = wait(patient, start(patient, asked), counts=3)
        assert begun.status == "in_progress"
        old = engine_pid(mesh, "one") if victim == "engine" else mesh.pid(victim)
        kill(old)
    batch = wait(patient, begun, within=240.0)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    answered = results(patient, batch.output_file_id)
    assert [answer["custom_id"] for answer in answered] == [f"request-{i}" for i in range(BATCH)]
    assert {answer["response"]["status_code"] for answer in answered} == {200}
    assert len({answer["response"]["body"]["id"] for answer in answered}) == BATCH
    for i in (0, BATCH // 2, BATCH - 1):
        request = json.loads(asked.splitlines()[i])["body"]
        alone = patient.chat.completions.create(**request).choices[0].message.content
        assert answered[i]["response"]["body"]["choices"][0]["message"]["content"] == alone
    if victim != "engine":
        until(lambda: restarted(mesh, victim, old), what=f"{victim} is restarted")


def test_new_supervisor_adopts_the_services_of_a_killed_one(mesh: Thaw, plain: openai.OpenAI) -> None:
    expected = ask(plain, "one")
    before = {s: mesh.pid(s) for s in ("nats", "postgres", "scheduler", "gateway", "nodeagent.node-0", "loader.node-0")}
    kill(mesh.pid("supervisor"))
    assert ask(plain, "one") == expected
    up = mesh.json("up", "--detach", "--port", str(mesh.port), "--config", str(mesh.home / "thaw.yaml"))
    assert up["models"]["unchanged"]
    assert {s: mesh.pid(s) for s in before} == before
    assert ask(plain, "one") == expected


def test_down_after_the_supervisor_was_killed_leaves_no_process(mesh: Thaw, plain: openai.OpenAI) -> None:
    """`thaw down` ends what a killed supervisor left, engines too.

    No later test has the module's mesh.
    """
    assert ask(plain, "one")
    kill(mesh.pid("supervisor"))
    done = mesh.json("down")
    assert done["was_running"] is False
    mesh.assert_nothing_left()
    assert mesh.json("down")["left_behind"] == {"processes": [], "segments": []}


def test_ctrl_c_stops_a_mesh_in_the_foreground() -> None:
    thaw = Thaw(THAW_ZYGOTE="false")  # no engine starts
    try:
        process = thaw.popen("up", "--port", str(thaw.port), "--nodes", "2", start_new_session=True)
        assert process.stdout is not None
        for line in process.stdout:
            if "Ctrl-C" in line:
                break
        nodes = thaw.json("node", "list")["nodes"]
        assert [n["node"] for n in nodes if n["alive"]] == ["node-0", "node-1"]
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        assert "the mesh is down" in out
        thaw.assert_nothing_left()
    finally:
        thaw.close()


@pytest.mark.parametrize("broken", [False, True])
def test_foreground_up_that_ends_during_registration_leaves_no_process(broken: bool) -> None:
    """A `thaw up` in the foreground that ends during registration leaves nothing.

    The test interrupts it when the mesh is up, or has a registration fail.
    """
    thaw = Thaw(THAW_ZYGOTE="false" if broken else "true")
    try:
        source = make_demo_model(thaw.home / "models" / "one", "test")
        if broken:
            (source / "tokenizer.json").unlink()
        config = thaw.home / "thaw.yaml"
        config.write_text(f"models: [{{name: one, source: {source}}}]\n")
        process = thaw.popen("up", "--port", str(thaw.port), "--config", str(config), start_new_session=True)
        assert process.stdout is not None
        for line in process.stdout:
            if "is up" in line:
                break
        if not broken:
            os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode in ((1,) if broken else (0, 130)), out + err
        assert ("tokenizer" in err) is broken
        thaw.assert_nothing_left()
    finally:
        thaw.close()


def test_ctrl_c_during_startup_leaves_no_process() -> None:
    thaw = Thaw()
    try:
        process = thaw.popen("up", "--port", str(thaw.port), start_new_session=True)
        until((thaw.home / "run" / "endpoints.json").exists, what="the supervisor has begun")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130, out + err
        thaw.assert_nothing_left()
    finally:
        thaw.close()
