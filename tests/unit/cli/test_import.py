"""`thaw import llama-swap`: real-world configurations become files for `thaw up`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shared.contracts.models import ModelSpec
from thaw.cli.app import main
from thaw.config import ConfigError, load_config
from thaw.llama_swap import Draft, render, translate

ROOT = Path(__file__).resolve().parents[3]

MACROS = """
healthCheckTimeout: 10
globalTTL: 300
logLevel: info
macros:
  models: MODELS
  "default_ctx": 4096
  "llama": >
    /opt/llama/llama-server
    --port ${PORT}
  "args": "--ctx-size ${default_ctx} --jinja"
models:
  "gpt-oss":
    macros:
      "default_ctx": 16384
      "temp": 0.7
    cmd: |
      # ${llama} is a macro, ${nothing} in a comment is none
      ${llama} ${args}
      --model ${models}/gpt-oss.gguf \\
      --temp ${temp} -ngl 999 -fa on --no-mmap -np 4
    name: "gpt-oss 120B"
    aliases: ["gpt-4o-mini", "two words"]
    ttl: 60
    filters: {stripParams: "temperature"}
  "draft":
    cmd: ${llama} ${args} -m ${models}/gpt-oss.gguf -md ${models}/small.gguf --tensor-split 3,1
    ttl: 0
    env: ["CUDA_VISIBLE_DEVICES=0,1", "TOKEN=${env.SECRET}"]
  "older":
    cmd: /opt/old/llama-server --port ${PORT} -m ${models}/gpt-oss.gguf
routing:
  router:
    settings:
      groups:
        forever: {persistent: true, swap: false, exclusive: false, members: [draft]}
        big: {members: [gpt-oss]}
  scheduler: {settings: {fifo: {priority: {gpt-oss: 10, draft: 1000}}}}
hooks: {on_startup: {preload: [gpt-oss]}}
peers: {other: {proxy: "http://192.168.1.23", models: [a]}}
"""

PYTHON = """
models:
  qwen:
    cmd: /opt/vllm/bin/vllm serve Qwen/Qwen3-0.6B --revision main --port ${PORT} --dtype half
      --tensor-parallel-size 2 --gpu-memory-utilization 0.8 --max-model-len 32k --enable-auto-tool-choice
    concurrencyLimit: 20
    unlisted: true
  own:
    cmd: python3 -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --port ${PORT} --context-length 4096 --disable-radix-cache
  rerank:
    cmd: /opt/rerank/serve --port ${PORT} --name ${MODEL_ID}
    checkEndpoint: /healthz
    capabilities: {context: 2048, reranker: true, in: [text]}
    cmdStop: kill -INT ${PID}
"""

CONTAINERS = """
models:
  "boxed:latest":
    cmd: |
      docker run --name ${MODEL_ID} --init --rm -p ${PORT}:8080 --gpus '"device=1"' -v MODELS:/models
      ghcr.io/ggml-org/llama.cpp:server
      --model '/models/gpt-oss.gguf' --host 0.0.0.0 --port 8080
    cmdStop: docker stop ${MODEL_ID}
  audio:
    cmd: podman run --rm -p ${PORT}:9000 -e MODE=fast --shm-size 2g --ipc=host -v /cache:/cache:ro example/audio:1 serve --port 9000
    capabilities: {context: 1024}
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    directory = tmp_path / "models"
    directory.mkdir()
    for name in ("gpt-oss.gguf", "small.gguf"):
        (directory / name).touch()
    return directory


def imported(tmp_path: Path, text: str, **environment: str) -> tuple[Draft, dict[str, ModelSpec]]:
    """Import a configuration.

    Returns:
        The draft, and the models of the resulting file with the manual additions.
    """
    draft = translate(text, "config.yaml", environment)
    for model in draft.models:
        model.options |= {key: {"memory": "1GiB", "max_model_len": 1024}[key] for key in model.missing}
        model.missing = {}
    path = tmp_path / "thaw.yaml"
    path.write_text(render(draft, "config.yaml"))
    return draft, {spec.name: spec for spec in load_config(path).models}


def losses(draft: Draft) -> dict[str, str]:
    return {loss.path: loss.reason for loss in draft.all_losses()}


def faults(text: str, **environment: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        translate(text, "config.yaml", environment)
    return caught.value.lines()


def test_macros_and_options_of_llama_server(tmp_path: Path, models: Path) -> None:
    draft, found = imported(tmp_path, MACROS.replace("MODELS", str(models)))
    large = found["gpt-oss"]
    assert large.source == str(models / "gpt-oss.gguf")
    assert (large.engine, large.max_model_len, large.max_concurrency) == ("llamacpp", 4096, 4)
    assert large.engine_args == {"temp": 0.7, "flash_attn": "on", "mmap": False}
    assert (large.keep_alive, large.aliases, large.priority, large.park) == (60, ("gpt-4o-mini",), 10, True)
    assert draft.mesh["environment"] == {"THAW_LLAMACPP_SERVER": "/opt/llama/llama-server"}
    assert draft.defaults == {"keep_alive": "300s", "init_timeout": "15s"}
    lost = losses(draft)
    assert {"logLevel", "peers", "models.gpt-oss.name", "models.gpt-oss.filters", "models.gpt-oss.aliases"} <= lost.keys()
    assert lost["routing.groups.big"].startswith("swap and exclusive")


def test_devices_pins_and_variables(tmp_path: Path, models: Path) -> None:
    _, found = imported(tmp_path, MACROS.replace("MODELS", str(models)))
    draft = found["draft"]
    assert draft.placement.devices == ("cuda:0", "cuda:1")
    assert draft.env == {"TOKEN": "${SECRET}"}  # the node's own variable: the secret is not in the file
    assert (draft.pin, draft.keep_alive, draft.priority) == (True, -1, 100)
    assert draft.engine_args == {"model_draft": str(models / "small.gguf"), "tensor_split": "3,1"}


def test_second_program_of_an_engine_is_imported_as_a_command(tmp_path: Path, models: Path) -> None:
    draft, found = imported(tmp_path, MACROS.replace("MODELS", str(models)))
    older = found["older"]
    assert older.command == ("/opt/old/llama-server", "--port", "{port}", "-m", str(models / "gpt-oss.gguf"))
    assert "THAW_LLAMACPP_SERVER" in losses(draft)["models.older.cmd"]


def test_vllm_sglang_and_custom_servers_are_imported(tmp_path: Path) -> None:
    draft, found = imported(tmp_path, PYTHON)
    qwen, own, rerank = found["qwen"], found["own"], found["rerank"]
    assert (qwen.engine, qwen.source, qwen.dtype, qwen.max_model_len) == ("vllm", "hf://Qwen/Qwen3-0.6B@main", "float16", 32_000)
    assert qwen.engine_args == {"tensor_parallel_size": 2, "enable_auto_tool_choice": True}
    assert (qwen.queue.max_waiting, qwen.keep_alive) == (20, -1)
    assert (own.engine, own.max_model_len, own.engine_args) == ("sglang", 4096, {"disable_radix_cache": True})
    assert (rerank.engine, rerank.health, rerank.routes, rerank.max_model_len) == ("openai", "/healthz", ("/v1/rerank",), 2048)
    assert rerank.command == ("/opt/rerank/serve", "--port", "{port}", "--name", "rerank")
    assert draft.mesh["environment"] == {"THAW_VLLM_PYTHON": "/opt/vllm/bin/python"}
    lost = losses(draft)
    assert {"models.qwen.cmd --gpu-memory-utilization", "models.qwen.unlisted", "models.rerank.cmdStop"} <= lost.keys()
    assert "THAW_SGLANG_PYTHON" in lost["cmd"]  # python3 is ambiguous: the user has to choose


def test_value_that_cannot_be_derived_is_marked_as_required() -> None:
    draft = translate(PYTHON, "config.yaml", {})
    assert draft.all_missing() == ["rerank: memory"]
    assert "    # memory:  # REQUIRED: " in render(draft, "config.yaml")


def test_container_commands_are_imported(tmp_path: Path, models: Path) -> None:
    draft, found = imported(tmp_path, CONTAINERS.replace("MODELS", str(models)))
    boxed, audio = found["boxed-latest"], found["audio"]
    assert boxed.source == str(models / "gpt-oss.gguf")  # its path on the host
    assert boxed.container is not None
    assert audio.container is not None
    assert (boxed.engine, boxed.container.port, boxed.container.mounts, boxed.container.args) == ("llamacpp", 8080, (), None)
    assert boxed.placement.devices == ("cuda:1",)
    assert (audio.engine, audio.container.args, audio.env) == ("openai", ("serve", "--port", "9000"), {"MODE": "fast"})
    assert (audio.container.shm_bytes, audio.container.mounts) == (2 << 30, ("/cache:/cache:ro",))
    lost = losses(draft)
    assert "shm_bytes" in lost["models.audio.cmd --ipc"]
    assert "boxed-latest" in lost["models.boxed:latest"]
    assert not any("cmdStop" in path for path in lost)  # Thaw stops the container


def test_volumes_that_are_no_paths_of_the_host_are_reported_and_variables_are_passed_on(tmp_path: Path, models: Path) -> None:
    volumes = f"-v hf-cache:/root/.cache -v /data -v ~/m:/m -v /opt:/opt -v {models}:/models"
    command = f"docker run {volumes} -e HF_TOKEN -e MODE=fast vllm/vllm-openai --model /models"
    draft, found = imported(tmp_path, f"models: {{m: {{cmd: '{command}'}}}}")
    container = found["m"].container
    assert container is not None
    assert container.mounts == ("/opt:/opt:rw",)
    assert found["m"].env == {"HF_TOKEN": "${HF_TOKEN}", "MODE": "fast"}
    reasons = [loss.reason for loss in draft.all_losses() if loss.path == "models.m.cmd --volume"]
    assert [reason.split()[0] for reason in reasons] == ["hf-cache:/root/.cache", "/data", "~/m:/m"]


@pytest.mark.parametrize(
    "options",
    [
        "--gpus all --rm -it --init --privileged -p 80:8080",
        "-itd --gpus=all -p80:8080",
        "-dp 80:8080 --no-healthcheck --oom-kill-disable",
        "-Pqp=80:8080 --read-only --sig-proxy=false",
        "--replace --tls-verify --rm=true -p 80:8080 --",
    ],
)
def test_options_of_docker_without_a_value_take_no_word(options: str) -> None:
    draft = translate(f"models: {{m: {{cmd: 'docker run {options} example/audio serve --fast'}}}}", "config.yaml", {})
    container = draft.models[0].options["container"]
    assert (container["image"], container["port"], container["args"]) == ("example/audio", 8080, ["serve", "--fast"])


def test_options_of_docker_that_are_switched_off_are_not_reported() -> None:
    draft = translate("models: {m: {cmd: 'docker run --privileged=false --read-only -it example/audio'}}", "config.yaml", {})
    assert [path for path in losses(draft) if "--" in path] == ["models.m.cmd --read-only"]


@pytest.mark.parametrize("options", ["-p", "-it", "--gpus", "-p 80:80"])
def test_docker_without_an_image_is_reported(options: str) -> None:
    [fault] = faults(f"models: {{m: {{cmd: 'docker run --rm {options}'}}}}")
    assert "names no image" in fault or "has no value" in fault


def test_number_of_slots_that_llama_server_chooses_itself_is_left_out(tmp_path: Path, models: Path) -> None:
    command = f"llama-server -m {models}/small.gguf -c 8192 -np -1"
    _, found = imported(tmp_path, f"models: {{m: {{cmd: '{command}'}}}}")
    assert (found["m"].max_model_len, found["m"].max_concurrency) == (8192, 1)


@pytest.mark.parametrize(
    "command",
    [
        "llama-server --port ${PORT} -hf ggml-org/gemma-3-1b-it-GGUF",
        "llama-server -m /a.gguf --lora /b --lora /c",
        "llama-server -zz 1",
    ],
)
def test_options_that_engine_args_cannot_express_keep_the_command(command: str) -> None:
    draft = translate(f"models: {{m: {{cmd: '{command}'}}}}", "config.yaml", {})
    (model,) = draft.models
    assert model.options["command"] == command.replace("${PORT}", "{port}").split()
    assert losses(draft)["models.m.cmd"].startswith("kept as a command, because ")


def test_matrix_routing_is_reported_as_unsupported() -> None:
    for text in ("matrix: {sets: {a: m}}", "routing: {router: {use: matrix, settings: {matrix: {sets: {a: m}}}}}"):
        draft = translate(f"models: {{m: {{cmd: llama-server -m /a.gguf}}}}\n{text}", "config.yaml", {})
        assert any("matrix" in path for path in losses(draft))


def test_keys_from_the_environment_do_not_enter_the_file() -> None:
    text = "apiKeys: [sk-one, '${env.KEY}']\nmodels: {m: {cmd: llama-server -m /a.gguf}}"
    draft = translate(text, "config.yaml", {"KEY": "secret"})
    assert draft.mesh["api_keys"] == ["sk-one"]
    assert "secret" not in render(draft, "config.yaml")


def test_every_fault_has_its_line() -> None:
    text = "models:\n  a: {cmd: '${nothing} x'}\n  b: {ttl: 3}\n  c: {cmd: x, ttl: soon}\n  d: {cmd: '${env.GONE}'}\n  e: {cmd: 'x \"'}\n"
    found = faults(text)
    assert [line.split(":")[1] for line in found] == ["2", "3", "4", "5", "6"]
    assert "macro ${nothing} is not defined" in found[0]
    assert "`cmd`" in found[1]
    assert "given 'soon'" in found[2]
    assert "variable GONE" in found[3]
    assert "quotation" in found[4]


@pytest.mark.parametrize("text", ["", "[]", "models: {}", "a: b", "models: ["])
def test_a_file_of_something_else_is_a_fault(text: str) -> None:
    assert faults(text)


def test_macros_in_a_circle_are_a_fault() -> None:
    assert "in a circle" in faults("macros: {a: '${b}', b: '${a}'}\nmodels: {m: {cmd: '${a} x'}}")[0]


def test_two_ids_with_the_same_derived_name_are_a_fault() -> None:
    assert "already" in faults("models: {'a:b': {cmd: x}, 'a b': {cmd: x}}")[0]


def test_command_writes_a_file_and_never_overwrites_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, target = tmp_path / "config.yaml", tmp_path / "thaw.yaml"
    config.write_text(PYTHON)
    assert main(["import", "llama-swap", str(config), "--output", str(target)]) == 0
    assert "set rerank: memory" in capsys.readouterr().out
    written = target.read_text()
    assert main(["import", "llama-swap", str(config), "--output", str(target), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "file_exists"
    assert target.read_text() == written


def test_json_output_has_the_file_and_its_open_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(PYTHON)
    assert main(["import", "llama-swap", str(config), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["models"] == ["qwen", "own", "rerank"]
    assert document["required"] == ["rerank: memory"]
    assert any("memory" in fault for fault in document["faults"])  # the result of `thaw up` now
    assert main(["import", "llama-swap", str(config)]) == 0
    assert capsys.readouterr().out == document["yaml"]


def test_memory_is_checked_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(PYTHON)
    assert main(["import", "llama-swap", str(config), "--memory", "much", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage"
    assert main(["import", "llama-swap", str(config), "--memory", "8GiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["required"], document["faults"]) == ([], [])


def test_missing_input_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "llama-swap", str(tmp_path / "none.yaml"), "--json"]) == 1
    assert "cannot be read" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_guide_shows_the_output_of_the_command() -> None:
    guide = (ROOT / "docs" / "from-llama-swap.md").read_text()
    config = next(block for block in re.findall(r"^```\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE) if "models:" in block)
    written = re.findall(r"^```yaml\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)[0]
    assert render(translate(config, "config.yaml", {}, "2GiB"), "config.yaml") == written
