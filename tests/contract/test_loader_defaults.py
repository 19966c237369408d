"""The loader's table of silent config.json values against transformers itself (which the loader does not import)."""

from __future__ import annotations

import json
import subprocess
import sys

from weights.formats.architectures import DEFAULTS

PRINT_DEFAULTS = """
import json, sys
from transformers import CONFIG_MAPPING
asked = json.loads(sys.argv[1])
print(json.dumps({kind: {key: getattr(CONFIG_MAPPING[kind](), key) for key in keys} for kind, keys in asked.items()}))
"""


def test_defaults_are_those_of_transformers() -> None:
    asked = json.dumps({kind: list(values) for kind, values in DEFAULTS.items()})
    ran = subprocess.run([sys.executable, "-c", PRINT_DEFAULTS, asked], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(ran.stdout.splitlines()[-1]) == {kind: dict(values) for kind, values in DEFAULTS.items()}


def test_the_loader_imports_neither_torch_nor_transformers() -> None:
    check = "import sys, services.loader.app; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'huggingface_hub')))"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
