"""Real vLLM and llama.cpp servers behind hosts, one of each for all tests of a process.

vLLM takes half a minute to start, most of it on one core: those of several files start together.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.contracts.engine import EngineStart
from shared.contracts.models import ModelCard
from shared.messaging import Mesh
from tests.support import forked_vllm
from tests.support.hosted import Hosts, hosted_card
from tests.support.patient_mesh import mesh
from tests.support.real_engines import directory as engines_directory
from tests.support.real_engines import llama_server, python_of
from tests.support.servers import NatsServer
from thaw.demo.models import make_demo_model

__all__ = ["mesh"]

PATIENCE_S = 240.0
"""vLLM takes half a minute to start on an idle machine, and two on a busy one."""
MAKE_GGUF = Path(__file__).with_name("make_gguf.py")


@dataclass(frozen=True)
class RealEngine:
    """A spawned host of one instance."""

    engine: str
    node: str
    instance: str
    process: subprocess.Popen[bytes]
    log: Path


LORA = {"enable_lora": True, "max_loras": 2}
FAMILY = "llama"
"""Family of the demo model, which all tests here run."""
_RUNS = {
    "vllm": ("vllm",),
    "plugin_vllm": ("vllm",),
    "from_loader": ("vllm",),
    "llamacpp": ("llamacpp",),
    "own_server": ("llama-server",),
    "parked": ("vllm", "llamacpp"),
}
"""Engines that tests run, by fixture; those of `real` are its parameter."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with the engines that their fixtures start."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        fixtures = set(getattr(item, "fixturenames", ()))
        chosen = {str(parameters[name]) for name in ("real", "engine") if name in parameters}
        for engine in sorted(chosen or {engine for name in fixtures & _RUNS.keys() for engine in _RUNS[name]}):
            item.add_marker(pytest.mark.runs(engine, FAMILY))


@pytest.fixture(scope="session", autouse=True)
def home() -> Iterator[Path]:
    """Create a state directory whose path is short enough for sockets.

    vLLM's findings about a class of models, which cost 18 CPU s, are kept beside its installation.
    """
    with tempfile.TemporaryDirectory(prefix="thaw-t-") as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("THAW_HOME", place)
        patch.setenv("VLLM_CACHE_ROOT", str(engines_directory() / "vllm-cache"))
        yield Path(place)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model with heads of 32 elements.

    The heads of the demo model "test" are too small for vLLM on cpu.
    """
    return make_demo_model(tmp_path_factory.mktemp("real") / "5m", "5m")


@pytest.fixture(scope="session")
def torn(model_directory: Path) -> list[int]:
    """Return tokens that are parts of a character's bytes, and no text by themselves."""
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    return [i for i in range(tokenizer.get_vocab_size()) if "\ufffd" in tokenizer.decode([i])]


@pytest.fixture(scope="session")
def gguf_file(model_directory: Path) -> Path:
    out = model_directory.parent / "5m.gguf"
    subprocess.run([python_of("llamacpp"), str(MAKE_GGUF), str(model_directory), str(out)], check=True)
    return out


def forked_python() -> str:
    """Return an interpreter whose vLLM forks its core and its workers: a start imports vLLM once.

    Tests of the start itself, and of memory, of which forked processes share a part, have the
    interpreter of `environment` or `python_of`, as users do.
    """
    return forked_vllm.interpreter(python_of("vllm"), Path(os.environ["THAW_HOME"]))


def environment(*engines: str) -> dict[str, str]:
    """Return the environment in which hosts find these engines.

    Skips the test, with the reason, if one is not installed.
    """
    return {f"THAW_{e.upper()}_PYTHON": python_of(e) for e in engines}


def spawned(engine: str, source: Path, url: str, directory: Path, **given: str) -> Iterator[RealEngine]:
    # On some processors recomputed 16-bit positions differ from decoded ones enough to part at
    # near-ties (docs/failover.md).
    options: dict[str, Any] = {"dtype": "float32", "engine_args": LORA} if engine == "vllm" else {}
    card = hosted_card(source, engine, context=1024, **options)
    hosts = Hosts(None, f"real-{directory.name}", url, directory)  # type: ignore[arg-type]  # only spawns
    # With threads of its own vLLM computes in its core's process. The other tests here start it
    # with a worker process.
    if not given:
        given = {"THAW_VLLM_PYTHON": forked_python()} if engine == "vllm" else environment(engine)
    start = hosts.host(card, THAW_ENGINE_THREADS="1", **given)
    process = hosts.processes[-1]
    yield RealEngine(engine, start.node, start.instance_id, process, Path(start.log_path))
    process.terminate()
    process.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def vllm(nats_server: NatsServer, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    yield from spawned("vllm", model_directory, nats_server.url, tmp_path_factory.mktemp("vllm"))


@dataclass(frozen=True)
class PluginEngine:
    """A spawned host of a vLLM with `load_format: thaw`, and its node's loader."""

    start: EngineStart
    spawner: Hosts
    loader: subprocess.Popen[bytes]

    def close(self) -> None:
        """End both; more than one call is allowed."""
        self.spawner.close()
        self.loader.terminate()
        self.loader.wait()


def plugin_card(directory: Path, **engine_args: Any) -> ModelCard:
    options: dict[str, Any] = {"engine_args": {"load_format": "thaw", **engine_args}, "dtype": "float32"}
    return hosted_card(directory, "vllm", context=1024, name=directory.name, **options)


@pytest.fixture(scope="session")
def plugin_vllm(nats_server: NatsServer, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginEngine]:
    yield from spawned_with_loader(plugin_card(model_directory), nats_server.url, tmp_path_factory.mktemp("plugin"))


def spawn_loader(node: str, url: str, home: str, logs: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "THAW_NATS_URL": url, "THAW_HOME": home, "THAW_NODE": node}
    env |= {"THAW_DRAM_READY_BYTES": "0", "THAW_PRETOUCH": "off"}  # populating memory takes CPU seconds from the starts
    with (logs / f"loader-{node}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", "services.loader"], env=env, stdout=log, stderr=log)


def spawned_with_loader(card: ModelCard, url: str, logs: Path) -> Iterator[PluginEngine]:
    python = forked_python()
    hosts = Hosts(None, f"real-{logs.name.replace('_', '-')}", url, logs)  # type: ignore[arg-type]  # only spawns
    with tempfile.TemporaryDirectory(prefix="thaw-t-") as home:
        loader = spawn_loader(hosts.node, url, home, logs)
        start = hosts.host(card, THAW_VLLM_PYTHON=python, THAW_HOME=home)
        found = PluginEngine(start, hosts, loader)
        yield found
        found.close()


@pytest.fixture(scope="session", autouse=True)
def started_together(request: pytest.FixtureRequest, home: Path) -> None:
    """Start the vLLMs that the collected tests share at once.

    A test that needs one waits until it is ready. Tests of its memory run when no other
    one of this process starts.
    """
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in sorted(asked & {"vllm", "plugin_vllm"}):
        with contextlib.suppress(pytest.skip.Exception):  # it is not installed: the tests that need it are skipped
            request.getfixturevalue(name)


@pytest.fixture(scope="session")
def llamacpp(nats_server: NatsServer, gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    yield from spawned("llamacpp", gguf_file, nats_server.url, tmp_path_factory.mktemp("llamacpp"))


@pytest.fixture(scope="session")
def own_server(nats_server: NatsServer, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """llama.cpp's own server."""
    program = llama_server()
    out = tmp_path_factory.mktemp("llama-server")
    gguf = out / "5m.gguf"
    subprocess.run([python_of("llamacpp"), str(MAKE_GGUF), str(model_directory), str(gguf)], check=True)
    yield from spawned("llamacpp", gguf, nats_server.url, out, THAW_LLAMACPP_SERVER=program)


@pytest.fixture(params=["vllm", "llamacpp"])
def real(request: pytest.FixtureRequest) -> RealEngine:
    found: RealEngine = request.getfixturevalue(request.param)
    return found


async def listening(mesh: Mesh, url: str, real: RealEngine) -> Hosts:
    """Yield a node's side for one test, once the engine is ready."""
    hosts = Hosts(mesh, real.node, url, real.log.parent)
    hosts.patience_s = PATIENCE_S
    await hosts.start()
    report = await hosts.settled(real.instance)
    assert report.state == "ready", report.error
    return hosts
