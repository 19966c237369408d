"""Two nodes on one machine: replicas, a drained node, a model with its own code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.contracts.models import ModelCard, ModelSpec
from shared.sizing import need_of
from tests.support.launcher import Thaw, until
from thaw.cli.demo import card_of
from thaw.demo.models import make_demo_model


@pytest.fixture(scope="module")
def mesh() -> Iterator[Thaw]:
    """Start a mesh whose nodes hold one instance each."""
    thaw = Thaw()
    thaw.environment["HF_HOME"] = str(thaw.home / "hf")  # transformers copies a model's trusted code there
    source = make_demo_model(thaw.home / "models" / "spread", "test")
    card: ModelCard = card_of(ModelSpec(name="spread", source=str(source)))
    budget = need_of(card).total * 3 // 2
    config = thaw.home / "thaw.yaml"
    config.write_text(
        f"mesh:\n  port: {thaw.port}\n  nodes: {{node-0: {{cpu:0: {budget}}}, node-1: {{cpu:0: {budget}}}}}\n"
        f"models: [{{name: spread, source: {source}, replicas: {{min: 2, max: 2}}}}]\n"
    )
    try:
        thaw.json("up", "--detach", "--config", str(config))
        yield thaw
    finally:
        thaw.close()


def nodes_of(mesh: Thaw, model: str) -> list[str]:
    nodes = mesh.cluster()["nodes"]
    return sorted(n["node"] for n in nodes for i in n["instances"] if (i["model"], i["state"]) == (model, "ready"))


def test_replicas_leave_a_drained_node_and_return(mesh: Thaw) -> None:
    until(lambda: nodes_of(mesh, "spread") == ["node-0", "node-1"], what="a replica on each node")
    mesh.json("node", "drain", "node-0", "--detach")
    until(lambda: nodes_of(mesh, "spread") == ["node-1"], what="node-0 is empty")
    assert mesh.json("chat", "spread", "Hello", "--max-tokens", "3")["text"]
    assert nodes_of(mesh, "spread") == ["node-1"]
    mesh.json("node", "uncordon", "node-0")
    until(lambda: nodes_of(mesh, "spread") == ["node-0", "node-1"], what="the replica is back")


def test_remote_code_is_executed_only_if_trusted(mesh: Thaw) -> None:
    own = _with_own_code(make_demo_model(mesh.home / "models" / "own", "test"))
    assert "trust_remote_code" in mesh.error("models", "add", "own", str(own))["message"]
    mesh.json("models", "rm", "spread")
    mesh.json("models", "add", "own", str(own), "--trust-remote-code")
    assert mesh.json("chat", "own", "Hello", "--max-tokens", "3")["usage"]["completion_tokens"] == 3


def _with_own_code(model: Path) -> Path:
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return model
