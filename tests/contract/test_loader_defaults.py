"""The loader's defaults of absent config.json values equal those of transformers.

The loader does not import transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys

from weights.formats.architectures import DEFAULTS
from weights.formats.known_architectures import CAUSAL_CLASSES, CAUSAL_TYPES, ENCODER_TYPES

PRINT_KNOWN = """
import json
from transformers.models.auto import modeling_auto as auto
causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
print(json.dumps([sorted(causal), sorted(set(causal.values())), sorted(auto.MODEL_MAPPING_NAMES)]))
"""

PRINT_DEFAULTS = """
import json, sys
from transformers import CONFIG_MAPPING
asked = json.loads(sys.argv[1])
print(json.dumps({kind: {key: getattr(CONFIG_MAPPING[kind](), key) for key in keys} for kind, keys in asked.items()}))
"""


def test_defaults_equal_those_of_transformers() -> None:
    asked = json.dumps({kind: list(values) for kind, values in DEFAULTS.items()})
    ran = subprocess.run([sys.executable, "-c", PRINT_DEFAULTS, asked], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(ran.stdout.splitlines()[-1]) == {kind: dict(values) for kind, values in DEFAULTS.items()}


def test_known_architectures_equal_those_of_transformers() -> None:
    ran = subprocess.run([sys.executable, "-c", PRINT_KNOWN], capture_output=True, text=True, check=True, timeout=120)
    known = json.loads(ran.stdout.splitlines()[-1])
    assert known == [sorted(CAUSAL_TYPES), sorted(CAUSAL_CLASSES), sorted(ENCODER_TYPES)]


def test_the_loader_imports_neither_torch_nor_transformers() -> None:
    check = "import sys, services.loader.app; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'huggingface_hub')))"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
