"""Models that share a process, through `thaw up`, beside dedicated ones with the same weights.

`node-1` is cordoned, so that all instances share the executor of `node-0`, except in the tests of
migrations.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import transformers as tf

from tests.support.adapters import write_adapter
from tests.support.launcher import Thaw, until
from tests.support.moving import Roomy, Stream, body
from tests.support.otlp import OtlpReceiver
from tests.support.paced_zygote import Pace
from tests.support.sizes import size
from thaw.demo.models import make_demo_model

TOKENS, STEP_S = size(100, 200), 0.3
"""Longer than a test needs, also on a busy machine: engines are slow meanwhile."""
LONG: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
LONGEST = LONG | {"max_tokens": 2 * TOKENS}
SHARED = ("first", "second", "vectors")


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def mesh(receiver: OtlpReceiver, pace: Pace) -> Iterator[Roomy]:
    """Start a mesh with three shared models, and two dedicated ones with the same weights."""
    thaw = Roomy(THAW_OTLP_ENDPOINT=receiver.grpc_url, OTEL_BSP_SCHEDULE_DELAY="200", THAW_SUSPEND="auto", **pace.environment)
    models = thaw.home / "models"
    first, second = [_generator(models / f"m{seed}", seed) for seed in (1, 2)]
    vectors = _encoder(models / "vectors", first)
    sources = {"first": first, "second": second, "vectors": vectors, "alone": first, "vectors-alone": vectors}
    config = {
        "mesh": {"port": thaw.port, "nodes": {"node-0": {"cpu:0": 1200 << 20}, "node-1": {"cpu:0": 400 << 20}}},
        "defaults": {"keep_alive": -1, "max_concurrency": 4},
        "models": [
            {"name": name, "source": str(source), "isolation": "shared" if name in SHARED else "dedicated"}
            for name, source in sources.items()
        ],
    }
    (thaw.home / "thaw.yaml").write_text(json.dumps(config))
    try:
        thaw.json("up", "--detach", "--config", str(thaw.home / "thaw.yaml"))
        thaw.json("node", "cordon", "node-1")
        yield thaw
    finally:
        thaw.close()


def _generator(directory: Path, seed: int) -> Path:
    source = make_demo_model(directory, "test", seed)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return source


def _encoder(directory: Path, tokenizer: Path) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    tf.BertModel(tf.BertConfig(**sizes, vocab_size=vocabulary, pad_token_id=0)).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, directory / file)
    return directory


def text(mesh: Thaw, model: str) -> str:
    return str(mesh.json("chat", model, "Once upon a time", "--max-tokens", "12", "--temperature", "0")["text"])


def embed(mesh: Thaw, model: str) -> list[float]:
    answer = httpx.post(f"{mesh.url}/v1/embeddings", json={"model": model, "input": "a b c"}, timeout=120)
    assert answer.is_success, answer.text
    return list(answer.json()["data"][0]["embedding"])


def running(mesh: Thaw, *models: str) -> dict[str, dict[str, Any]]:
    """Return the ready instances by model; those of `models` may respond before they are ready."""
    for model in models:
        mesh.instance(model)
    return {i["model"]: i for i in mesh.cluster()["instances"] if i["state"] == "ready"}


def executor(mesh: Thaw) -> int:
    """Return the pid of the process of all shared models, started where necessary."""
    text(mesh, "first"), text(mesh, "second"), embed(mesh, "vectors")
    [pid] = {pid for name, i in running(mesh, *SHARED).items() if name in SHARED for pid in i["pids"]}
    return int(pid)


def kill(pid: int) -> None:
    process = psutil.Process(pid)
    process.kill()
    psutil.wait_procs([process], timeout=60)


@pytest.fixture(scope="module")
def undisturbed(mesh: Roomy) -> dict[str, Stream]:
    """Return a long response of each model without faults."""
    names = ("first", "second", "alone")
    return {name: Stream(mesh.url, body(name, **LONG)).start().result() for name in names}


def started(mesh: Roomy, names: tuple[str, ...] = ("first", "second"), fields: Mapping[str, Any] = LONG) -> dict[str, Stream]:
    streams = {name: Stream(mesh.url, body(name, **fields)).start() for name in names}
    assert all(s.opened.wait(120) for s in streams.values())
    return streams


def test_shared_models_answer_sleep_wake_and_survive_the_end_of_their_executor(mesh: Roomy) -> None:
    answers = {name: text(mesh, name) for name in ("first", "second", "alone")}
    assert answers["first"] == answers["alone"] != answers["second"]
    ready = running(mesh, "first", "second", "alone")
    assert ready["first"]["pids"] == ready["second"]["pids"] != ready["alone"]["pids"]
    [pid] = ready["first"]["pids"]

    mesh.json("sleep", "second")
    assert psutil.pid_exists(pid), "the other model still runs in it"
    assert set(running(mesh)) == {"first", "alone"}
    mesh.json("wake", "second")
    assert running(mesh)["second"]["pids"] == [pid]
    assert text(mesh, "second") == answers["second"]
    spans = {span["phase"] for span in mesh.plan("second")["measured"]}
    assert "attach" in spans
    assert "container" not in spans

    kill(pid)
    until(lambda: set(running(mesh)) == {"alone"}, what="both models of the executor have failed")
    assert [text(mesh, name) for name in ("first", "second")] == [answers["first"], answers["second"]]
    ready = running(mesh, "first", "second")
    assert ready["first"]["pids"] == ready["second"]["pids"] != [pid]


def test_embeddings_are_those_of_a_dedicated_engine(mesh: Roomy, pace: Pace) -> None:
    pid = executor(mesh)
    alone = embed(mesh, "vectors-alone")
    assert running(mesh, "vectors-alone")["vectors-alone"]["pids"] != [pid]
    assert embed(mesh, "vectors") == pytest.approx(alone, abs=1e-6)
    with pace.slowed(STEP_S):
        streams = started(mesh)
        assert embed(mesh, "vectors") == pytest.approx(alone, abs=1e-6), "while other models generate"
    for stream in streams.values():
        assert stream.result().done
    assert embed(mesh, "second") != pytest.approx(embed(mesh, "first"), abs=1e-3), "generators embed, too"


def test_adapters_of_a_shared_model_answer_as_those_of_a_dedicated_one(mesh: Roomy) -> None:
    pid = executor(mesh)
    source = mesh.home / "models" / "m1"
    for seed, name in enumerate(("sql", "poems")):
        adapter = write_adapter(mesh.home / "adapters" / name, source, seed=seed, strength=0.5)
        mesh.json("models", "add", name, str(adapter), "--base", "first")
        mesh.json("models", "add", f"{name}-alone", str(adapter), "--base", "alone")
    names = ("first", "second", "sql", "poems")
    expected = {name: text(mesh, "alone" if name == "first" else f"{name}-alone") for name in ("first", "sql", "poems")}
    expected["second"] = text(mesh, "second")
    assert len(set(expected.values())) == 4
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(lambda name: _complete(mesh, name), names * 3))
    assert together == [_complete(mesh, name) for name in names] * 3, "in one batch, beside another model"
    assert {name: text(mesh, name) for name in names} == expected
    ready = running(mesh)
    assert ready["first"]["pids"] == ready["second"]["pids"] == [pid]
    mesh.json("sleep", "first")
    assert text(mesh, "sql") == expected["sql"], "it wakes its base"
    assert running(mesh, "first")["first"]["pids"] == [pid]
    for name in ("sql", "poems"):
        mesh.json("models", "rm", name)
        mesh.json("models", "rm", f"{name}-alone")


def _complete(mesh: Thaw, model: str) -> str:
    asked = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{mesh.url}/v1/completions", json=asked, timeout=120)
    assert answer.is_success, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_every_stream_of_a_killed_executor_continues(mesh: Roomy, pace: Pace, undisturbed: dict[str, Stream]) -> None:
    pid = executor(mesh)
    with pace.slowed(STEP_S):
        streams = started(mesh)
        kill(pid)
    for name, stream in streams.items():
        stream.result().assert_same(undisturbed[name])
    assert executor(mesh) != pid


def test_streams_outlive_the_nodeagent_and_the_executor_is_adopted(mesh: Roomy, pace: Pace, undisturbed: dict[str, Stream]) -> None:
    pid = executor(mesh)
    mesh.json("sleep", "vectors")
    with pace.slowed(STEP_S):
        streams = started(mesh)
        old = mesh.kill("nodeagent.node-0")
        mesh.await_replaced("nodeagent.node-0", old)
    for name, stream in streams.items():
        stream.result().assert_same(undisturbed[name])
    until(lambda: {"first", "second"} <= set(running(mesh)), what="the instances are adopted")
    assert executor(mesh) == pid, "another model is attached to the adopted executor"


def test_sleeping_detaches_and_waking_attaches(mesh: Roomy) -> None:
    pid = executor(mesh)
    expected = text(mesh, "second")
    ready = running(mesh)
    until(lambda: bool(running(mesh)["second"]["cannot_suspend"]), what="the instance is assessed")
    assert not running(mesh)["second"]["can_suspend"]
    assert "attaches it again" in running(mesh)["second"]["cannot_suspend"]
    slept = mesh.json("sleep", "second")
    assert slept["freed_bytes"] >= 0
    assert "second" not in running(mesh)
    assert text(mesh, "second") == expected, "a request wakes it"
    awake = running(mesh, "second")["second"]
    assert awake["pids"] == [pid]
    assert awake["instance_id"] != ready["second"]["instance_id"]


def test_start_of_the_executor_and_attach_are_different_phases(mesh: Roomy, receiver: OtlpReceiver) -> None:
    pid = executor(mesh)
    for name in SHARED:
        mesh.json("sleep", name)
    kill(pid)
    found: dict[str, set[str]] = {}
    for name in ("first", "second"):
        stream = Stream(mesh.url, body(name, max_tokens=4)).start().result()
        until(lambda r=stream.request_id: mesh.inside("trace", r, "--json")[0] == 0, what="the trace is written")  # type: ignore[misc]
        request = mesh.json("trace", stream.request_id)["request"]
        assert request["cold"]
        found[name] = {span["phase"] for span in request["critical_path"]}
        measured = {span["phase"] for span in mesh.plan(name)["measured"]}
        assert ("attach" in measured, "container" in measured) == (name == "second", name == "first")
    assert "container" in found["first"]
    assert "attach" in found["second"]
    assert "container" not in found["second"]
    span = receiver.wait_for("attach")
    assert any(s.trace_id == span.trace_id and s.name == "load second" for _, s in receiver.spans)


def test_ps_shows_the_instances_of_an_executor(mesh: Roomy) -> None:
    pid = executor(mesh)
    _, shown = mesh.inside("ps")
    ready = running(mesh)
    for name in SHARED:
        assert ready[name]["pids"] == [pid]
        [line] = [line for line in shown.splitlines() if line.split()[:1] == [name]]
        assert "ready" in line
        assert ready[name]["instance_id"][:6] in line
    until(lambda: sum(running(mesh)[name]["memory_bytes"] for name in SHARED) > 0, what="the executor's memory is measured")


def test_migrated_stream_of_a_shared_model_equals_the_undisturbed_one(mesh: Roomy, pace: Pace) -> None:
    pid = executor(mesh)
    undisturbed = {name: stream.result() for name, stream in started(mesh, fields=LONGEST).items()}
    mesh.json("node", "uncordon", "node-1")
    try:
        with pace.slowed(STEP_S):
            streams = started(mesh, fields=LONGEST)
            (record,) = mesh.order(request_id=streams["first"].request_id, node="node-1")["migrations"]
        assert record["state"] == "done", record
        assert [m["outcome"] for m in record["requests"]] == ["moved"]
        for name, stream in streams.items():
            stream.result().assert_same(undisturbed[name])
        with pace.slowed(STEP_S):
            streams = started(mesh, fields=LONGEST)
            drained = mesh.json("node", "drain", "node-0")
        assert drained["left"] == []
        for name, stream in streams.items():
            stream.result().assert_same(undisturbed[name])
        assert {i["node"] for i in running(mesh).values()} == {"node-1"}
    finally:
        mesh.json("node", "uncordon", "node-0")
        mesh.json("node", "cordon", "node-1")
    assert psutil.pid_exists(pid), "an executor without instances waits for the next"
