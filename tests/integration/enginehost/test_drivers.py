"""One suite for every driver, against a server like the engine.

The server takes the options and serves the endpoints that the engine's documentation publishes.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import subjects
from shared.contracts.engine import EngineAsleep, EngineProbed, SleepEngine, WakeEngine
from shared.contracts.phases import Phase
from shared.errors import UnsupportedParameter
from tests.integration.enginehost.driver_cards import ENGINES, SETTINGS, card_of
from tests.support.hosted import MIB, Hosts, fake_program, hosted_card


class Driven:
    """A ready engine of one kind."""

    def __init__(self, hosts: Hosts, instance: str) -> None:
        self.hosts = hosts
        self.instance = instance
        self.control = subjects.engine_control(instance)

    async def stats(self) -> Any:
        return (await self.hosts.request_route(self.instance, "/stats", "GET")).json

    async def calls(self) -> list[str]:
        return [path for _, path, _ in (await self.stats())["calls"]]


async def drive(hosts: Hosts, tmp_path: Path, engine: str, *, device: str = "cpu:0", **more: Any) -> Driven:
    start = hosts.host(card_of(tmp_path, engine, **more), device=device, **{SETTINGS[engine]: fake_program(tmp_path, engine)})
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    return Driven(hosts, start.instance_id)


@pytest.mark.parametrize("engine", ENGINES)
async def test_engine_starts_responds_and_streams_under_the_models_name(hosts: Hosts, tmp_path: Path, engine: str) -> None:
    driven = await drive(hosts, tmp_path, engine)
    whole = await hosts.request(driven.instance, "chat", messages=[], max_tokens=3)
    assert whole.json["choices"][0]["message"]["content"] == "t0 t1 t2 "
    streamed = await hosts.request(driven.instance, "completion", prompt="x", max_tokens=6, stream=True)
    assert streamed.text() == "t0 t1 t2 t3 t4 t5 "
    assert streamed.usage is not None
    assert streamed.usage.completion_tokens == 6
    embedded = await hosts.request(driven.instance, "embedding", input="x")
    assert embedded.json["data"][0]["embedding"] == [0.5, 0.25]


@pytest.mark.parametrize("engine", ENGINES)
async def test_engine_sleeps_and_wakes_by_its_own_endpoints(hosts: Hosts, tmp_path: Path, engine: str) -> None:
    driven = await drive(hosts, tmp_path, engine, device="cuda:1")
    hosted = hosts.reports[driven.instance][-1].hosted
    assert hosted is not None
    expected = {"vllm": (1, 2), "sglang": (1, 2), "ollama": (2,)}.get(engine, ())
    assert hosted.sleep_levels == expected
    for level in (1, 2):
        if level not in expected:
            with pytest.raises(UnsupportedParameter):
                await hosts.mesh.request(driven.control, SleepEngine(level=level), EngineAsleep)
            assert (await hosts.request(driven.instance, "chat", messages=[])).status == 200
            continue
        await hosts.mesh.request(driven.control, SleepEngine(level=level), EngineAsleep)
        assert (await hosts.request(driven.instance, "chat", messages=[])).error is not None
        probed = await hosts.mesh.request(driven.control, WakeEngine(), EngineProbed)
        assert probed.same
        assert (await hosts.request(driven.instance, "chat", messages=[])).status == 200
    env = (await driven.stats())["env"]
    assert env.get("VLLM_SERVER_DEV_MODE") == ("1" if engine == "vllm" else None)
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")


async def test_vllms_second_sleep_level_reads_the_weights_before_restoring_the_cache(hosts: Hosts, tmp_path: Path) -> None:
    driven = await drive(hosts, tmp_path, "vllm", device="cuda:0")
    await hosts.mesh.request(driven.control, SleepEngine(level=2), EngineAsleep)
    await hosts.mesh.request(driven.control, WakeEngine(), EngineProbed)
    found = [c for c in await driven.calls() if c.startswith(("/sleep", "/wake", "/coll"))]
    assert found == ["/sleep?level=2", "/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]


async def test_sglang_level_1_keeps_a_weights_copy_and_level_2_rereads_them(hosts: Hosts, tmp_path: Path) -> None:
    driven = await drive(hosts, tmp_path, "sglang", device="cuda:0")
    assert {"--enable-memory-saver", "--enable-weights-cpu-backup"} <= set((await driven.stats())["argv"])
    for level in (1, 2):
        await hosts.mesh.request(driven.control, SleepEngine(level=level), EngineAsleep)
        await hosts.mesh.request(driven.control, WakeEngine(), EngineProbed)
    calls = [
        (path, reported.get("tags"))
        for _, path, reported in (await driven.stats())["calls"]
        if path.endswith(("_occupation", "_disk"))
    ]
    release, resume = "/release_memory_occupation", "/resume_memory_occupation"
    assert calls == [
        (release, ["kv_cache", "weights"]),
        (resume, ["weights"]),
        (resume, ["kv_cache"]),
        (release, ["kv_cache", "weights"]),
        (resume, ["weights"]),
        ("/update_weights_from_disk", None),
        (resume, ["kv_cache"]),
    ]


async def test_sglang_without_a_weights_copy_has_only_level_2(hosts: Hosts, tmp_path: Path) -> None:
    driven = await drive(hosts, tmp_path, "sglang", device="cuda:0", engine_args={"enable_weights_cpu_backup": False})
    hosted = hosts.reports[driven.instance][-1].hosted
    assert hosted is not None
    assert hosted.sleep_levels == (2,)
    assert "--enable-weights-cpu-backup" not in (await driven.stats())["argv"]


async def test_vllm_shares_gpus_with_other_processes(hosts: Hosts, tmp_path: Path) -> None:
    """vLLM shares GPUs with other processes.

    vLLM refuses to start if less than its share of the GPU is free, even with an explicit cache
    size; that size applies to each GPU.
    """
    source = tmp_path / "model"
    source.mkdir()
    start = hosts.spec(hosted_card(source, "vllm"), kv_bytes=64 * MIB, THAW_VLLM_PYTHON=fake_program(tmp_path, "vllm"))
    start = start.model_copy(update={"device": "cuda:0", "devices": ("cuda:0", "cuda:1")})
    hosts.spawn(start, "services.enginehost")
    assert (await hosts.settled(start.instance_id)).state == "ready"
    stats = await Driven(hosts, start.instance_id).stats()
    argv = " ".join(stats["argv"])
    assert f"--kv-cache-memory-bytes {32 * MIB} --gpu-memory-utilization 0.01" in argv
    assert stats["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"


async def test_vllm_command_line_has_the_configured_options(hosts: Hosts, tmp_path: Path) -> None:
    args = {"tool_call_parser": "hermes", "enable_prefix_caching": False, "kv_cache_bytes": 99 * MIB}
    driven = await drive(hosts, tmp_path, "vllm", engine_args=args, dtype="bfloat16", trust_remote_code=True)
    stats = await driven.stats()
    argv = " ".join(stats["argv"])
    for expected in (
        "-m vllm.entrypoints.openai.api_server",
        f"--model {tmp_path}",
        "--served-model-name demo",
        "--max-model-len 256 --max-num-seqs 4 --dtype bfloat16",
        "--trust-remote-code",
        f"--kv-cache-memory-bytes {64 * MIB}",
        "--enforce-eager",
        "--scheduling-policy priority",
        "--tool-call-parser hermes --no-enable-prefix-caching",
    ):
        assert expected in argv
    env = stats["env"]
    assert "VLLM_SERVER_DEV_MODE" not in env, "it does not sleep here"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["VLLM_API_KEY"] not in argv
    if (os.cpu_count() or 1) > 1:
        assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["OMP_NUM_THREADS"]) == ("nobind", "1"), "THAW_ENGINE_THREADS of one"
        assert "--distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor" in argv, "no worker process"


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="Thaw limits no threads on one core")
@pytest.mark.parametrize(("given", "expected"), [("tensor_parallel_size", None), ("distributed_executor_backend", "ray")])
async def test_vllm_of_several_ranks_or_with_a_chosen_executor_has_workers(
    hosts: Hosts, tmp_path: Path, given: str, expected: str | None
) -> None:
    driven = await drive(hosts, tmp_path, "vllm", engine_args={given: expected or 2})
    argv = (await driven.stats())["argv"]
    chosen = [argv[i + 1] for i, option in enumerate(argv) if option == "--distributed-executor-backend"]
    assert chosen == ([expected] if expected else [])


async def test_model_missing_from_ollama_is_pulled_and_loaded(hosts: Hosts, tmp_path: Path) -> None:
    may_end = tmp_path / "may end"
    program = fake_program(tmp_path, "ollama", "--hold-pull", shlex.quote(str(may_end)))
    start = hosts.host(card_of(tmp_path, "ollama"), **{SETTINGS["ollama"]: program})
    await hosts.reported(start.instance_id, lambda r: r.phase is Phase.FETCH and r.progress > 0)
    may_end.touch()
    assert (await hosts.settled(start.instance_id)).state == "ready"
    assert (await Driven(hosts, start.instance_id).calls())[:3] == ["/api/show", "/api/pull", "/api/generate"]


@pytest.mark.parametrize("engine", ["ollama", "llamacpp"])
async def test_embedding_model_is_loaded_for_embeddings(hosts: Hosts, tmp_path: Path, engine: str) -> None:
    """An embedding model is loaded as one.

    Ollama refuses to generate with it, even for an empty request; llama.cpp's server embeds only
    with its option.
    """
    card = hosted_card("engine://embed-small", engine, memory=MIB) if engine == "ollama" else card_of(tmp_path, engine)
    card = card.model_copy(update={"info": card.info.model_copy(update={"task": "embed"})})
    start = hosts.host(card, **{SETTINGS[engine]: fake_program(tmp_path, engine)})
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    driven = Driven(hosts, start.instance_id)
    if engine == "llamacpp":
        assert "--embeddings" in (await driven.stats())["argv"]
        return
    await hosts.mesh.request(driven.control, SleepEngine(level=2), EngineAsleep)
    assert (await hosts.mesh.request(driven.control, WakeEngine(), EngineProbed)).same


async def test_model_that_ollama_cannot_pull_is_named(hosts: Hosts, tmp_path: Path) -> None:
    card = hosted_card("engine://nowhere", "ollama", memory=MIB)
    start = hosts.host(card, THAW_OLLAMA_PROGRAM=fake_program(tmp_path, "ollama"))
    report = await hosts.settled(start.instance_id)
    assert report.error is not None
    assert "nowhere" in report.error.message
    assert "file does not exist" in report.error.message


async def test_gguf_file_is_imported_into_ollama_by_digest(hosts: Hosts, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    start = hosts.host(hosted_card(file, "ollama"), THAW_OLLAMA_PROGRAM=fake_program(tmp_path, "ollama"))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    driven = Driven(hosts, start.instance_id)
    calls = await driven.calls()
    assert [c.split("/")[2] for c in calls[:5]] == ["show", "blobs", "blobs", "create", "generate"]
    assert (await hosts.request(driven.instance, "chat", messages=[])).json["model"].startswith("thaw-")
