"""Models and meshes of bench.density."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.own_mesh import own_mesh
from shared.ports import free_port
from shared.sizing import ATTACHED_BYTES, MIB, PAGE_BYTES
from thaw.demo.models import make_demo_model

SIZE = "5m"
CONTEXT = 256
EXECUTOR_BYTES = 192 * MIB
DEVICES = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
_TICKS = os.sysconf("SC_CLK_TCK")


def cached_models(count: int, directory: Path) -> dict[str, Path]:
    """Return models with different random weights by name; make those that the directory lacks."""
    found = {}
    for seed in range(count):
        source = directory / f"{SIZE}-{CONTEXT}" / f"m{seed:03}"
        if not (source / "config.json").exists():
            draft = make_demo_model(source.with_name(f"{source.name}.draft"), SIZE, seed)
            config = draft / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
            draft.rename(source)
        found[source.name] = source
    return found


def weights_bytes(source: Path) -> int:
    """Return the bytes that a model's weights take of a device's pages."""
    size = (source / "model.safetensors").stat().st_size
    return (-(-size // PAGE_BYTES) + 2) * PAGE_BYTES  # units are whole pages


def model_bytes(source: Path) -> int:
    """Return what a shared instance reserves: weights, one page of KV cache, and its modules."""
    return weights_bytes(source) + PAGE_BYTES + ATTACHED_BYTES


def device_bytes(source: Path, models: int) -> int:
    """Return the size of a device with room for `models` shared instances."""
    return EXECUTOR_BYTES + models * model_bytes(source)


@dataclass(frozen=True)
class Setup:
    """The models of a mesh, and its settings.

    Attributes:
        models: Directories of the models, by name.
        resident: Number of models for which each device has room.
        policy: Name of the scheduler's policy.
        isolation: `shared` executors, or `dedicated` processes.
        slo_ms: Objective for the first token; None: the models have none.
        queue_s: Seconds that a request may wait in the queue.
    """

    models: Mapping[str, Path]
    resident: int
    policy: str = "thaw"
    isolation: str = "shared"
    slo_ms: float | None = None
    queue_s: float = 30.0


class BenchMesh:
    """A running mesh, and what it uses."""

    def __init__(self, environment: dict[str, str], port: int, metrics_port: int) -> None:
        self.port, self._metrics_port = port, metrics_port
        self._home = Path(environment["THAW_HOME"])

    def count_starts(self) -> float:
        """Return the number of instances that have become ready so far."""
        text = httpx.get(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if line.startswith("thaw_plan_outcomes_total{") and '"ready"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def _services(self) -> dict[int, str]:
        status = json.loads((self._home / "run" / "supervisor.json").read_text())
        named = {s["process"]["pid"]: name.split(".")[0] for name, s in status["services"].items() if s["process"]}
        return named | {status["supervisor"]["pid"]: "supervisor"}

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return the mesh's processes by service; executors and engines are `engines`."""
        names = self._services()
        found: dict[str, list[psutil.Process]] = {}
        for pid, name in names.items():
            try:
                process = psutil.Process(pid)
                children = [] if name == "supervisor" else process.children(recursive=True)
            except psutil.Error:
                continue
            found.setdefault(name, []).append(process)
            found.setdefault("engines" if name == "nodeagent" else name, []).extend(children)
        return found

    def cpu_s(self) -> dict[str, float]:
        """Return CPU seconds by service, with those of children that have ended."""
        return {name: sum(map(_cpu_s, processes)) for name, processes in self.processes().items()}

    def memory_bytes(self) -> dict[str, float]:
        """Return the proportional set size (PSS) by service; weights are shared memory."""
        return {name: sum(map(_pss_bytes, processes)) for name, processes in self.processes().items()}


def _cpu_s(process: psutil.Process) -> float:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(fields[i]) for i in (11, 12, 13, 14)) / _TICKS  # utime, stime, cutime, cstime


def _pss_bytes(process: psutil.Process) -> float:
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0.0)


@contextmanager
def running_mesh(setup: Setup) -> Iterator[BenchMesh]:
    """Run a mesh with one node inside the block."""
    first = next(iter(setup.models.values()))
    port, metrics_port = free_port(), free_port()
    device = {"size": device_bytes(first, setup.resident), "memory": "separate"}
    defaults: dict[str, Any] = {
        "keep_alive": -1,
        "isolation": setup.isolation,
        "max_concurrency": 4,
        "queue": {"timeout": setup.queue_s},
        "engine_args": {"kv_cache_bytes": PAGE_BYTES},
    }
    if setup.slo_ms is not None:
        defaults["slo"] = {"ttft": setup.slo_ms / 1e3, "percentile": 0.98}
    config = {
        "mesh": {
            "nodes": {"node-0": dict.fromkeys(DEVICES, device)},
            "environment": {
                "THAW_LOG_LEVEL": "error",
                "THAW_ENGINE_THREADS": "1",
                "THAW_SUSPEND": "off",
                "THAW_PEER_HOST": "",
                "THAW_DRAM_BYTES": str(sum(map(weights_bytes, setup.models.values()))),
                "THAW_DRAM_READY_BYTES": "0",
                "THAW_SCHEDULER_METRICS_PORT": str(metrics_port),
            },
        },
        "scheduler": {"policy": setup.policy},
        "defaults": defaults,
        "models": [{"name": name, "source": str(source)} for name, source in setup.models.items()],
    }
    with tempfile.TemporaryDirectory(prefix="thaw-density-") as directory:
        path = Path(directory) / "thaw.yaml"
        path.write_text(json.dumps(config))
        with own_mesh("--config", str(path), port=port) as environment:
            yield BenchMesh(environment, port, metrics_port)
