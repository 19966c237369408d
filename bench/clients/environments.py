"""Environments with one client library each, in the cache directory.

The product needs none of these libraries, and they need different versions of openai. A library is
installed once as of a date, which pins everything that it depends on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

WHOLE = ".whole"
AS_OF = "2026-11-27T00:00:00Z"
"""Releases after this time are not considered for what the pinned packages depend on."""
_VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


@dataclass(frozen=True)
class Library:
    """A library, the packages to install for it, and the module under `probes` that uses it."""

    name: str
    packages: tuple[str, ...]
    module: str


LIBRARIES = (
    Library("langchain-openai", ("langchain-openai==1.7.4",), "langchain_openai"),
    Library("litellm", ("litellm==1.110.2",), "litellm"),
    Library("instructor", ("instructor==1.17.0",), "instructor"),
    Library("pydantic-ai-slim", ("pydantic-ai-slim[openai,anthropic]==2.68.0",), "pydantic_ai"),
    Library(
        "llama-index-llms-openai-like",
        ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),
        "llama_index",
    ),
    Library("openai-agents", ("openai-agents==0.24.0",), "openai_agents"),
    Library("guidellm", ("guidellm==0.8.1", "torch==2.13.0"), "guidellm"),
)


def directory(library: Library) -> Path:
    """Return the environment's place, by versions, interpreter and machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = os.path.realpath(sys.executable)  # a checkout's environment may be somewhere else each time
    key = "\n".join((*library.packages, AS_OF, platform.python_version(), platform.machine(), platform.libc_ver()[1], python))
    return cache / "thaw" / "clients" / f"{library.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def install(library: Library) -> str:
    """Install the library if it is missing, and return its interpreter.

    Raises:
        subprocess.CalledProcessError: uv failed; its output says why.
    """
    target = directory(library)
    interpreter = str(target / "bin" / "python")
    if (target / WHOLE).exists():
        return interpreter
    shutil.rmtree(target, ignore_errors=True)
    uv = [sys.executable, "-m", "uv"]
    # uv does not read pip's settings; a folder of wheels holds the CPU builds of torch.
    links = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(target)], check=True)
    subprocess.run(
        [*uv, "pip", "install", "-q", "--python", interpreter, "--exclude-newer", AS_OF, *library.packages],
        check=True,
        env=links | os.environ,
    )
    (target / WHOLE).touch()
    return interpreter


def version_of(interpreter: str, package: str) -> str:
    """Return the version of a package in an environment; empty if it is missing."""
    done = subprocess.run([interpreter, "-c", _VERSION, package], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
