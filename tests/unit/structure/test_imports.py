"""Modules that the processes of a mesh do not import at start.

Each unneeded import costs every start, and every restart after a crash.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

LIBRARIES_OF_ENGINES = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub", "PIL", "sympy", "jinja2"}
DATABASE = {"sqlalchemy", "asyncpg", "alembic"}
OF_OTHERS = {
    "obstore",  # only loaders of models in object stores
    "httpx",  # the command line's client
    "yaml",  # thaw.yaml, which only the command line reads
    "opentelemetry.exporter.otlp",  # only with THAW_OTLP_ENDPOINT
    "cuda",  # only where there is a driver
    "pynvml",
    "pygments",
    "rich",
}
MESSAGING = {"faststream", "nats", "opentelemetry", "prometheus_client"}
EVERY_SERVICE = LIBRARIES_OF_ENGINES | OF_OTHERS

UNNEEDED = {
    "services.gateway.__main__": EVERY_SERVICE | DATABASE,
    "services.scheduler.__main__": EVERY_SERVICE | {"alembic"},  # only for a schema that is not up to date
    "services.migrator.__main__": EVERY_SERVICE | DATABASE,
    "services.nodeagent.__main__": EVERY_SERVICE | DATABASE | {"prometheus_client"},
    "services.loader.__main__": EVERY_SERVICE | DATABASE | {"prometheus_client"},
    "services.enginehost.__main__": EVERY_SERVICE | DATABASE | {"prometheus_client"},
    "shared.watchdog.__main__": EVERY_SERVICE | DATABASE | MESSAGING | {"pydantic", "asyncio", "psutil"},
    "thaw.launcher.supervisor": EVERY_SERVICE | DATABASE | MESSAGING,
    "thaw.cli.up": LIBRARIES_OF_ENGINES | DATABASE | MESSAGING,
}


def imported(module: str) -> set[str]:
    """Return the names of all modules that a new process has after importing `module`."""
    script = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", UNNEEDED)
def test_a_process_imports_no_more_than_it_needs(module: str) -> None:
    found = imported(module)
    assert module in found
    assert found & UNNEEDED[module] == set()


def test_every_unneeded_module_exists() -> None:
    """A misspelled name would never be found."""
    from importlib.util import find_spec

    names = set().union(*UNNEEDED.values())
    assert {n for n in names if find_spec(n) is None} == set()


def test_imports_are_exempt_from_collections() -> None:
    script = (
        "import gc; from shared.imports import uncollected_imports\n"
        "with uncollected_imports():\n    assert not gc.isenabled()\n    import asyncio\n"
        "assert gc.isenabled()\nprint(gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 0
