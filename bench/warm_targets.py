"""Run the servers of the warm path's benchmark.

They are NATS, the engine of prepared tokens, a gateway process, and a LiteLLM proxy process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import yaml

from bench.prepared_engine import FREE, PACED
from shared.ports import free_port
from thaw.launcher.servers import MAX_PAYLOAD, nats_program

DIRECT, THAW, LITELLM = "direct", "thaw", "litellm"
LITELLM_REQUIREMENT = "litellm[proxy]>=1.100"
_READY_WITHIN_S = 120.0


@dataclass
class Target:
    """Something that answers chat completions.

    Attributes:
        processes: The processes that work for it, by name.
    """

    name: str
    port: int
    processes: dict[str, psutil.Process]


class Processes:
    """The processes of a run, their output in files, ended with it."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._stack = stack

    def start(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> psutil.Process:
        log = self._stack.enter_context((self._directory / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, stdout=log, stderr=log)
        self._stack.callback(_end, process)
        return psutil.Process(process.pid)

    def await_answer(self, name: str, port: int, model: str) -> None:
        """Until the process streams an answer."""
        body = {"model": model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1, "stream": True}
        deadline = time.monotonic() + _READY_WITHIN_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=10)
                if answer.is_success and b"[DONE]" in answer.content:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{name} does not answer:\n{(self._directory / f'{name}.log').read_text()[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    # The wheel's nats-server is a launcher of the real one.
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()


@contextlib.contextmanager
def running(pace_ms: float, litellm: Path | None) -> Iterator[list[Target]]:
    """All servers, each answering.

    Args:
        litellm: The interpreter of its environment, or none to leave it out.
    """
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory, contextlib.ExitStack() as stack:
        home = Path(directory)
        processes = Processes(home, stack)
        engine_port, gateway_port = free_port(), free_port()
        nats_url, nats = start_nats(processes, home)
        engine_command = ["bench.prepared_engine", "--nats", nats_url, "--port", str(engine_port), "--pace", str(pace_ms)]
        engine = processes.start("engine", [sys.executable, "-m", *engine_command])
        gateway_settings = {"THAW_NATS_URL": nats_url, "THAW_GATEWAY_PORT": str(gateway_port), "THAW_HOME": str(home)}
        gateway = processes.start("gateway", [sys.executable, "-m", "services.gateway"], gateway_settings)
        targets = [
            Target(DIRECT, engine_port, {"engine": engine}),
            Target(THAW, gateway_port, {"engine": engine, "nats": nats, "proxy": gateway}),
        ]
        if litellm is not None:
            proxy, port = _start_litellm(processes, litellm, home, engine_port)
            targets.append(Target(LITELLM, port, {"engine": engine, "proxy": proxy}))
        for target in targets:
            processes.await_answer(
                "engine" if target.name == DIRECT else "gateway" if target.name == THAW else LITELLM, target.port, FREE
            )
        yield targets


def start_nats(processes: Processes, home: Path) -> tuple[str, psutil.Process]:
    """A NATS server that answers: its URL and its process."""
    port = free_port()
    config = home / "nats.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\nmax_payload: {MAX_PAYLOAD}\njetstream {{ store_dir: "{home}/jetstream" }}\n')
    nats = processes.start("nats", [nats_program(), "-c", str(config)])
    _await_port(port)
    return f"nats://127.0.0.1:{port}", nats


def _await_port(port: int) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"nothing listens on port {port}")


def _start_litellm(processes: Processes, python: Path, home: Path, engine_port: int) -> tuple[psutil.Process, int]:
    """Start the proxy as its documentation recommends for production.

    It has one worker, no callbacks, and no debug output.
    """
    port = free_port()
    base = f"http://127.0.0.1:{engine_port}/v1"
    models = [
        {"model_name": m, "litellm_params": {"model": f"openai/{m}", "api_base": base, "api_key": "none"}} for m in (FREE, PACED)
    ]
    config = home / "litellm.yaml"
    config.write_text(yaml.safe_dump({"model_list": models, "litellm_settings": {"set_verbose": False, "request_timeout": 600}}))
    environment = {
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
    }
    arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    return processes.start(LITELLM, [str(python.parent / "litellm"), *arguments], environment), port


def litellm_python() -> Path:
    """Return the interpreter of a virtual environment with LiteLLM's proxy.

    The environment is created if it is missing.
    """
    place = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "thaw-bench" / "litellm"
    python = place / "bin" / "python"
    if not (place / "bin" / "litellm").exists():
        print(f"installing {LITELLM_REQUIREMENT} into {place}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", LITELLM_REQUIREMENT], check=True)
    return python


def litellm_version(python: Path) -> str:
    ask = "from importlib.metadata import version; print(version('litellm'))"
    return subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
