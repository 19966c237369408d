"""A model's settings as YAML are read back as the same settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.domain.model_yaml import model_yaml
from shared.contracts.models import ContainerOptions, ModelSpec, PlacementRules, QueueLimits, Replicas, Slo
from thaw.config import load_config

SPECS = [
    ModelSpec(name="plain", source="hf://org/model"),
    ModelSpec(name="sql", source="hf://org/sql", base="plain"),
    ModelSpec(
        name="all",
        source="https://models.example/m",
        aliases=("gpt-4", "yes"),
        keep_alive=-1,
        replicas=Replicas(min=1, max=3),
        priority=-5,
        pin=True,
        placement=PlacementRules(labels={"zone": "*"}, devices=("gpu-*/cuda:0",), spread=True),
        queue=QueueLimits(max_waiting=3),
        slo=Slo(ttft=0.5, percentile=0.9),
        memory=5 << 30,
        engine_args={"kv_cache_bytes": 1 << 30, "note": "a: b # c"},
    ),
    ModelSpec(
        name="own",
        source="engine://m",
        engine="openai",
        memory=1 << 30,
        max_model_len=4096,
        env={"TOKEN": "${HF_TOKEN}", "FLAG": "no", "SIZE": "010"},
        container=ContainerOptions(image="x/y:1", args=("--port", "{port}")),
    ),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_settings_are_read_back(spec: ModelSpec, tmp_path: Path) -> None:
    base = [] if spec.base is None else [next(s for s in SPECS if s.name == spec.base)]
    path = tmp_path / "thaw.yaml"
    text = "".join(model_yaml(s) if i == 0 else model_yaml(s).removeprefix("models:\n") for i, s in enumerate([*base, spec]))
    path.write_text(text)
    assert load_config(path).models[-1] == spec


def test_defaults_are_left_out() -> None:
    assert model_yaml(SPECS[0]) == "models:\n- name: plain\n  source: hf://org/model\n"


def test_secrets_of_a_source_are_left_out() -> None:
    text = model_yaml(ModelSpec(name="m", source="https://user:password@host/m?token=secret"))
    assert text.splitlines()[0].startswith("# The source's user, password")
    assert "source: https://host/m\n" in text
    assert "secret" not in text
    assert "password@" not in text
