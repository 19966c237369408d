"""The loader's defaults of absent config.json values equal those of transformers.

The loader does not import transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from weights.formats.architectures import DEFAULTS
from weights.formats.known_architectures import CAUSAL_CLASSES, CAUSAL_TYPES, ENCODER_TYPES

PRINT = """
import json, sys
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto
asked = json.loads(sys.argv[1])
causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
print(json.dumps({
    "defaults": {kind: {key: getattr(CONFIG_MAPPING[kind](), key) for key in keys} for kind, keys in asked.items()},
    "known": [sorted(causal), sorted(set(causal.values())), sorted(auto.MODEL_MAPPING_NAMES)],
}))
"""


@pytest.fixture(scope="module")
def of_transformers() -> dict[str, Any]:
    asked = json.dumps({kind: list(values) for kind, values in DEFAULTS.items()})
    ran = subprocess.run([sys.executable, "-c", PRINT, asked], capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_defaults_equal_those_of_transformers(of_transformers: dict[str, Any]) -> None:
    assert of_transformers["defaults"] == {kind: dict(values) for kind, values in DEFAULTS.items()}


def test_known_architectures_equal_those_of_transformers(of_transformers: dict[str, Any]) -> None:
    assert of_transformers["known"] == [sorted(CAUSAL_TYPES), sorted(CAUSAL_CLASSES), sorted(ENCODER_TYPES)]


def test_the_loader_imports_neither_torch_nor_transformers() -> None:
    check = "import sys, services.loader.app; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'huggingface_hub')))"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
