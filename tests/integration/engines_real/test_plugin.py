"""An unmodified vLLM with `load_format: thaw`.

It reads weights from the node's loader or from files, with the same tokens as its own loader, and
changes its model for others of the same template key. One vLLM for all tests of the module.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.enginehost.drivers.overlay import plugin_path
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import ChangeModel, EngineReport
from shared.contracts.models import ModelCard
from tests.integration.engines_real.conftest import FAMILY, PATIENCE_S, PluginEngine, plugin_card
from tests.integration.nodeagent.harness import gone
from tests.support.hosted import Hosts
from tests.support.mesh_client import connected_mesh
from tests.support.patient_mesh import PatientMesh
from tests.support.process_memory import held_bytes
from tests.support.real_engines import python_of
from tests.support.servers import NatsServer
from thaw.demo.models import make_demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE_S), pytest.mark.asyncio(loop_scope="module")]
TOKENS = 24
PROMPT = "The ice"
MODELS = 10
CHANGES = int(os.environ.get("THAW_TEST_CHANGES", "12"))
"""Changes of the model in a row, without growth of memory. `make test-long` sets 100."""
GREETING = "{% for m in messages %}{{ 'Greeting: ' + m['content'] }}{% endfor %}"


@dataclass
class FromLoader:
    """A vLLM whose host has become `instance`."""

    hosts: Hosts
    environment: dict[str, str]
    instance: str
    log: str

    async def report(self) -> EngineReport:
        return await self.hosts.settled(self.instance)

    async def change(self, card: ModelCard) -> EngineReport:
        start = self.hosts.spec(card).model_copy(update={"environment": self.environment})
        await self.hosts.mesh.request(subjects.engine_control(self.instance), ChangeModel(start=start), Done)
        self.instance, self.log = start.instance_id, start.log_path
        return await self.report()

    async def tokens(self) -> list[int]:
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await self.hosts.request(self.instance, "completion", return_token_ids=True, **asked)
        found: list[int] = answer.json["choices"][0]["token_ids"]
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def from_loader(nats_server: NatsServer, plugin_vllm: PluginEngine) -> AsyncIterator[FromLoader]:
    start = plugin_vllm.start
    async with connected_mesh(nats_server, PatientMesh) as mesh:
        hosts = Hosts(mesh, start.node, nats_server.url, plugin_vllm.spawner.directory)
        hosts.patience_s = PATIENCE_S
        await hosts.start()
        with contextlib.closing(plugin_vllm):
            found = FromLoader(hosts, start.environment, start.instance_id, start.log_path)
            report = await found.report()
            assert report.state == "ready", report.error
            yield found


@pytest.fixture(scope="module")
def models(model_directory: Path) -> list[Path]:
    """Create models of one shape; the last has another chat template."""
    found = [make_demo_model(model_directory.parent / f"seed{i}", "5m", seed=i) for i in range(1, MODELS + 1)]
    (found[-1] / "chat_template.jinja").write_text(GREETING)
    return found


def greedy(directory: Path) -> list[int]:
    """Return the tokens of transformers in fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(directory)(PROMPT, return_tensors="pt")["input_ids"]
    model.generation_config.eos_token_id = None
    out = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    tokens: list[int] = out[0, prompt.shape[1] :].tolist()
    return tokens


async def test_vllm_with_load_format_thaw_gives_the_same_tokens(from_loader: FromLoader, model_directory: Path) -> None:
    assert "from its loader" in Path(from_loader.log).read_text()
    assert await from_loader.tokens() == greedy(model_directory)


async def test_models_of_one_shape_in_turn_give_their_own_tokens(from_loader: FromLoader, models: list[Path]) -> None:
    """Models that never ran: their tokens, names and chat templates, in the same processes."""
    before = await from_loader.report()
    assert before.hosted is not None
    for directory in models:
        report = await from_loader.change(plugin_card(directory))
        assert (report.state, report.fell_back) == ("ready", None), report.error
        assert report.hosted is not None
        assert set(report.hosted.pids) == set(before.hosted.pids), "the same processes"
        assert await from_loader.tokens() == greedy(directory)
    listed = await from_loader.hosts.request_route(from_loader.instance, "/v1/models", "GET")
    assert [m["id"] for m in listed.json["data"]] == [models[-1].name]
    messages = [{"role": "user", "content": "Hello"}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    answer = await from_loader.hosts.request(from_loader.instance, "chat", **body)
    tokenizer = AutoTokenizer.from_pretrained(models[-1])
    expected = tokenizer(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    assert answer.json["prompt_token_ids"] == expected["input_ids"]


async def test_json_mode_constrains_the_changed_model(from_loader: FromLoader, models: list[Path]) -> None:
    await from_loader.change(plugin_card(models[0]))
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, "temperature": 0}
    answer = await from_loader.hosts.request(from_loader.instance, "chat", response_format=asked, **body)
    assert answer.status == 200, answer.body
    # The model's weights are random: it may continue with spaces up to the limit.
    assert answer.json["choices"][0]["message"]["content"].startswith('{"a"')


async def test_many_changes_leave_memory_as_it_was(from_loader: FromLoader, models: list[Path]) -> None:
    sizes: list[int] = []
    for n in range(CHANGES):
        report = await from_loader.change(plugin_card(models[n % 2]))
        assert (report.state, report.fell_back) == ("ready", None), report.error
        assert report.hosted is not None
        sizes.append(held_bytes(report.hosted.pids))
    assert max(sizes[-3:]) <= 1.03 * max(sizes[: max(2, CHANGES // 4)]), [s >> 20 for s in sizes]


async def test_killed_host_takes_its_engine_along(from_loader: FromLoader) -> None:
    report = await from_loader.report()
    assert report.hosted is not None
    assert len(report.hosted.pids) > 1, "vLLM's core too"
    os.kill(report.pid, signal.SIGKILL)
    assert all([await gone(pid) for pid in report.hosted.pids])


PROGRAM = """
import json, sys
from safetensors.torch import load_file
from weights.vllm_plugin import weights
with weights(sys.argv[1], None) as coming:
    found = dict(coming)
expected = load_file(sys.argv[1] + "/model.safetensors")
print(json.dumps([len(found), all((found[name] == tensor).all().item() for name, tensor in expected.items())]))
"""


@pytest.mark.runs("vllm", FAMILY)
async def test_without_a_loader_the_files_are_read(model_directory: Path, tmp_path: Path) -> None:
    """Without a loader the plug-in reads the files.

    vLLM's environment has nothing of Thaw but the overlay.
    """
    done = subprocess.run(  # noqa: ASYNC221
        [python_of("vllm"), "-c", PROGRAM, str(model_directory)],
        env={**os.environ, "PYTHONPATH": str(plugin_path(tmp_path / "overlay"))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [39, True]
