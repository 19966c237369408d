"""Find installed engines other than the builtin one, for `thaw doctor`."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from shared.contracts.engines import CAPABILITIES, Engine

_PROBE_WITHIN_S = 20.0


@dataclass(frozen=True)
class Place:
    """The setting and the program of an engine.

    Attributes:
        variable: Variable that names the program.
        program: Program to use without the variable; empty: none.
        module: Module that the program's interpreter must have.
    """

    engine: Engine
    variable: str
    program: str
    module: str = ""


PLACES = (
    Place("vllm", "THAW_VLLM_PYTHON", "python3", "vllm"),
    Place("llamacpp", "THAW_LLAMACPP_PYTHON", "python3", "llama_cpp.server"),
    Place("llamacpp", "THAW_LLAMACPP_SERVER", ""),
    Place("sglang", "THAW_SGLANG_PYTHON", "python3", "sglang"),
    Place("ollama", "THAW_OLLAMA_PROGRAM", "ollama"),
    Place("tensorrt-llm", "THAW_TRTLLM_SERVE", "trtllm-serve"),
)


def find_installed() -> tuple[list[str], list[str]]:
    """Describe the installed engines, and faults of engines that a variable names."""
    found, faults = ["builtin"], []
    for place in PLACES:
        program = os.environ.get(place.variable) or place.program
        if _is_there(program, place.module):
            tested = "" if CAPABILITIES[place.engine].run_by_us else ", not run by us"
            found.append(f"{place.engine} ({program}{tested})")
        elif place.variable in os.environ:
            lacks = f"has no {place.module}" if place.module else "is no program"
            faults.append(f"{place.variable}={program} {lacks}")
    socket = Path(os.environ.get("THAW_CONTAINER_SOCKET") or "/var/run/docker.sock")
    if socket.is_socket():
        found.append(f"containers ({socket})")
    return list(dict.fromkeys(found)), faults


def _is_there(program: str, module: str) -> bool:
    path = shutil.which(program)
    if path is None or not module:
        return path is not None
    root = module.partition(".")[0]
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({root!r}) is None)"
    try:
        return subprocess.run([path, "-c", code], capture_output=True, timeout=_PROBE_WITHIN_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
