"""A mesh from `thaw up --detach` to `thaw down`, with the real OpenAI client.

Three models share a device that has room for two.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.chats import QUESTION, ask, stream
from tests.e2e.conftest import MODELS
from tests.support.launcher import Thaw, until

EXECUTED = True
DRAM = 0
"""A sleeping model is read from its files again: these tests damage the files."""


def test_processes_are_executed_and_forked_from_the_launchers_own_servers(mesh: Thaw, client: openai.OpenAI) -> None:
    """The whole start is the users': none of these processes is of the tests' fork server."""
    ask(client, "one")
    commands = [" ".join(p.cmdline()) for p in mesh.processes()]
    engine = mesh.instance("one")["pids"][0]
    for module in ("thaw.launcher.supervisor", "thaw.launcher.forkserver", "services.gateway", "services.engine.zygote"):
        assert any(f"-m {module}" in command for command in commands), commands
    assert any(
        engine == child.pid
        for zygote in mesh.processes()
        if "services.engine.zygote" in zygote.cmdline()
        for child in zygote.children()
    )
    assert not any("tests' fork server" in c or "tests.support" in c for c in commands), commands


def test_three_models_are_served_on_a_device_with_room_for_two(mesh: Thaw, client: openai.OpenAI) -> None:
    first = {model: ask(client, model) for model in MODELS}
    assert len(set(first.values())) == len(MODELS)
    # The third model has evicted the first. A repeated request evicts again, and greedy decoding
    # gives the same text.
    for model in MODELS:
        text, tokens, reason = stream(client, model)
        assert (text, tokens, reason) == (first[model], 12, "length")
    until(lambda: sum(bool(mesh.instances(m)) for m in MODELS) == 2, what="two models are ready")


def test_hundred_requests_for_one_cold_model_cause_one_load(mesh: Thaw, client: openai.OpenAI) -> None:
    mesh.json("sleep", "one")
    before = mesh.json("explain", "one")["plan_id"]
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda _: ask(client, "one", 4), range(100)))
    assert len(answers) == 100
    # float32 greedy output is the same for one sequence and for a batch.
    assert len(set(answers)) == 1
    plan = mesh.plan("one")
    assert plan["plan_id"] != before
    assert plan["outcome"] == "ready"
    assert mesh.instance("one")["plan_id"] == plan["plan_id"]


def test_trace_of_a_cold_request_tiles_its_ttft(mesh: Thaw, client: openai.OpenAI) -> None:
    mesh.json("sleep", "two")
    ask(client, "two")
    until(lambda: mesh.json("trace")["request"]["model"] == "two", what="the trace is written")
    shown = mesh.json("trace")
    request, load = shown["request"], shown["load"]
    assert request["cold"] is True
    total = sum(s["duration_ms"] for s in request["critical_path"])
    assert total == pytest.approx(request["ttft_ms"], rel=0.05, abs=5)
    phases = {s["phase"] for s in request["spans"]}
    assert {"schedule", "container", "init", "prefill"} <= phases
    assert load["model"] == "two"
    assert load["outcome"] == "ready"
    assert mesh.json("trace", request["request_id"])["request"] == request
    text = mesh.run("trace").stdout
    assert "TTFT" in text
    assert "█" in text


def test_ps_shows_states_and_memory(mesh: Thaw, client: openai.OpenAI) -> None:
    ask(client, "three")
    mesh.instance("three")
    cluster = mesh.cluster()
    states = {m["card"]["spec"]["name"]: m["state"] for m in cluster["models"]}
    assert states["three"] == "ready"
    (device,) = cluster["nodes"][0]["devices"]
    assert 0 < device["reserved_bytes"] <= device["budget_bytes"]
    text = mesh.run("ps").stdout
    assert "three" in text
    assert "cpu:0" in text


def test_sleep_frees_the_device_and_wake_restarts_the_model(mesh: Thaw) -> None:
    awake = mesh.json("wake", "two")
    slept = mesh.json("sleep", "two")
    assert slept["instances"] == [awake["instance_id"]]
    assert slept["freed_bytes"] > 0
    assert mesh.instances("two") == []
    assert mesh.json("sleep", "two")["instances"] == []
    again = mesh.json("wake", "two")
    assert again["instance_id"] != awake["instance_id"]
    assert [i["instance_id"] for i in mesh.instances("two")] == [again["instance_id"]]


def test_explain_names_the_evicted_instance(mesh: Thaw, client: openai.OpenAI) -> None:
    for model in MODELS:
        ask(client, model, 2)
    plan = mesh.plan("three")
    assert plan["model"] == "three"
    assert plan["chosen"]["device_ids"] == ["cpu:0"]
    assert plan["candidates"]
    assert "three" in mesh.run("explain", "three").stdout


def test_chat_streams_and_answers(mesh: Thaw) -> None:
    shown = mesh.json("chat", "one", "Hello", "--max-tokens", "6", "--temperature", "0")
    assert shown["usage"]["completion_tokens"] == 6
    assert shown["text"]
    done = mesh.run("chat", "one", "Hello", "--max-tokens", "6", "--temperature", "0")
    assert shown["text"].strip() in done.stdout


def test_errors_name_a_remedy(mesh: Thaw, plain: openai.OpenAI) -> None:
    for verb in ("wake", "sleep", "explain"):
        error = mesh.error(verb, "nobody")
        assert error["code"] in ("model_not_found", "not_found")
        assert "thaw models" in error["remedy"]
    assert mesh.error("models", "add", "x", "/nowhere")["code"] == "invalid_model"
    assert mesh.error("wake", status=2)["code"] == "usage"
    with pytest.raises(openai.NotFoundError) as caught:
        ask(plain, "nobody")
    assert caught.value.code == "model_not_found"


def test_failed_registration_leaves_no_model(mesh: Thaw) -> None:
    broken = mesh.home / "models" / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    error = mesh.error("models", "add", "broken", str(broken))
    assert error["code"] in ("checkpoint_invalid", "invalid_model", "unsupported_architecture")
    names = {m["spec"]["name"] for m in mesh.json("models", "list")["models"]}
    assert names == set(MODELS)


def test_second_up_applies_only_the_changes_of_the_file(mesh: Thaw) -> None:
    config = mesh.home / "thaw.yaml"
    text = config.read_text()
    changed = text.replace("keep_alive: -1", "keep_alive: 1h").replace("name: three", "name: third")
    config.write_text(changed)
    up = mesh.json("up", "--detach", "--config", str(config))
    assert up["already_running"] is True
    assert up["restart_needed"] == []
    assert up["models"]["added"] == ["third"]
    assert sorted(up["models"]["changed"]) == ["one", "two"]
    assert up["models"]["removed"] == ["three"]
    config.write_text(text)
    back = mesh.json("up", "--detach", "--config", str(config))
    assert (back["models"]["added"], back["models"]["removed"]) == (["three"], ["third"])
    assert mesh.json("up", "--detach", "--config", str(config))["models"]["unchanged"] == list(MODELS)


def test_second_up_without_a_file_leaves_the_models_unchanged(mesh: Thaw) -> None:
    before = mesh.json("models", "list")
    up = mesh.json("up", "--detach")
    assert up["models"] == {"added": [], "changed": [], "unchanged": [], "removed": []}
    assert mesh.json("models", "list") == before


def test_invalid_file_changes_no_model(mesh: Thaw) -> None:
    config = mesh.home / "bad.yaml"
    config.write_text("models:\n  - name: x\n    sorce: .\n")
    error = mesh.error("up", "--detach", "--config", str(config))
    assert error["code"] == "invalid_config"
    assert {(f["line"], f["path"]) for f in error["details"]} == {(2, "models[0].source"), (3, "models[0].sorce")}
    assert {m["spec"]["name"] for m in mesh.json("models", "list")["models"]} == set(MODELS)


def test_cordoned_node_is_shown_as_cordoned(mesh: Thaw) -> None:
    mesh.json("sleep", "one")
    mesh.json("node", "cordon", "node-0")
    try:
        (node,) = mesh.json("node", "list")["nodes"]
        assert node["cordoned"] is True
    finally:
        mesh.json("node", "uncordon", "node-0")
    mesh.json("wake", "one")


def test_drained_node_is_emptied_after_its_streams_have_ended(mesh: Thaw, client: openai.OpenAI) -> None:
    mesh.json("wake", "one")
    chunks = client.chat.completions.create(model="one", messages=QUESTION, max_tokens=400, temperature=0, stream=True)
    next(iter(chunks))
    mesh.json("node", "drain", "node-0", "--detach")
    try:
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert reasons == ["length"]
        until(lambda: mesh.json("node", "list")["nodes"][0]["devices"][0]["reserved_bytes"] == 0, what="the node is empty")
        assert mesh.json("node", "list")["nodes"][0]["cordoned"] is True
    finally:
        mesh.json("node", "uncordon", "node-0")
    assert ask(client, "one")


def _truncate(model: Path) -> None:
    os.truncate(model / "model.safetensors", 100_000)


def _empty_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


def _other_shapes(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))


def _no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _other_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))


@pytest.mark.parametrize("damage", [_truncate, _empty_tokenizer, _other_shapes, _no_weights, _other_architecture])
def test_damage_after_the_registration_is_reported_and_repaired(
    mesh: Thaw, plain: openai.OpenAI, damage: Callable[[Path], None]
) -> None:
    model, kept = mesh.home / "models" / "one", mesh.home / "models" / "kept"
    mesh.json("sleep", "one")
    shutil.copytree(model, kept)
    try:
        damage(model)
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            ask(plain, "one")
        assert caught.value.code == ("unsupported_architecture" if damage is _other_architecture else "checkpoint_invalid")
        (view,) = (m for m in mesh.cluster()["models"] if m["card"]["spec"]["name"] == "one")
        assert view["state"] == "failed"
        assert view["error"] in caught.value.message
        assert "\n" not in view["error"]
        assert mesh.instances("one") == []
    finally:
        shutil.copytree(kept, model, dirs_exist_ok=True)
        shutil.rmtree(kept)
    assert ask(plain, "one")


def test_every_service_has_logs(mesh: Thaw) -> None:
    for service in ("gateway", "scheduler", "migrator", "nodeagent", "loader", "nats", "postgres", "supervisor", "engine"):
        assert mesh.json("logs", service)["logs"]
    assert "gateway" in mesh.error("logs", "nobody")["remedy"]


def test_doctor_finds_a_healthy_mesh(mesh: Thaw) -> None:
    findings = {f["subject"]: f for f in mesh.json("doctor")["findings"]}
    assert findings["nats"]["level"] == "ok"
    assert findings["postgres"]["level"] == "ok"
    assert "running" in findings["mesh"]["text"]


def test_the_endpoint_needs_the_admin_key(mesh: Thaw) -> None:
    assert httpx.get(f"{mesh.url}/admin/v1/cluster", timeout=120).status_code == 401
    for name in ("endpoints.json", "credentials.json", "mesh.json", "nats.conf"):
        assert (mesh.home / "run" / name).stat().st_mode & 0o077 == 0
