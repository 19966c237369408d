"""Cold TTFT of the demo models, by phase, against a fresh `transformers` process that does the
same.

    python -m bench.cold_path [--rounds N] [--models 5m,60m,250m] [--json PATH]

Each round takes, for each model and in this order: the peer with a warm and with a dropped file
cache, then a mesh with a zygote and one without, each after an eviction with a warm and with a
dropped file cache. The very first start of each model in each mesh is reported on its own. TTFT is
what a client measures: request sent → first text received. Dropping the cache needs root; without
it those figures are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from bench.report import machine, median, spread, write
from shared.ports import free_port
from thaw.demo.models import make_demo_model

PROMPT = "Say something about winter."
PEER = """
import sys, time
from transformers import AutoModelForCausalLM, AutoTokenizer
path = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
chat = [{"role": "user", "content": sys.argv[2]}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(output[0, -1:]), flush=True)
"""


@dataclass
class Samples:
    """Milliseconds by (model, condition), and phases of the critical paths."""

    ttft: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    phases: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))


class BenchMesh:
    """A mesh in a temporary home, driven through the public command line and API."""

    def __init__(self, home: Path, models: dict[str, Path], *, zygote: bool) -> None:
        # An eviction is to be a stop here, whatever this machine could do instead.
        self.environment = {
            **os.environ,
            "THAW_HOME": str(home),
            "THAW_ZYGOTE": "true" if zygote else "false",
            "THAW_SUSPEND": "off",
        }
        config = home.parent / f"{home.name}.yaml"
        entries = [{"name": name, "source": str(path), "keep_alive": -1} for name, path in models.items()]
        config.write_text(
            yaml.safe_dump({"mesh": {"port": free_port(), "nodes": {"node-0": {"cpu:0": "6GiB"}}}, "models": entries})
        )
        up = self.thaw("up", "--detach", "--config", str(config))
        self.url = str(up["endpoint"])
        self.http = httpx.Client(base_url=self.url, timeout=300)

    def thaw(self, *arguments: str) -> dict[str, object]:
        command = [sys.executable, "-m", "thaw", *arguments, "--json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    def ttft(self, model: str) -> tuple[float, dict[str, float]]:
        """Milliseconds to the first text, and the critical path's milliseconds by phase."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
        }
        started = time.perf_counter()
        first = 0.0
        with self.http.stream("POST", "/chat/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not first and line.startswith("data: {") and '"content"' in line:
                    first = (time.perf_counter() - started) * 1e3
            request = response.headers["x-request-id"]
        phases: dict[str, float] = defaultdict(float)
        trace = self.thaw("trace", request)
        for segment in trace["request"]["critical_path"]:  # type: ignore[index]  # JSON
            phases[segment["phase"]] += segment["duration_ms"]
        return first, phases

    def close(self) -> None:
        self.http.close()
        self.thaw("down")


def drop_file_cache() -> bool:
    """Write dirty pages back and empty the page cache.

    False where that is not allowed.
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def peer_ttft(model: Path) -> float:
    """Milliseconds from starting a fresh Python process to its first token."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", PEER, str(model), PROMPT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        elapsed = (time.perf_counter() - started) * 1e3
    if process.returncode != 0:
        raise RuntimeError("the transformers peer failed")
    return elapsed


def measure(models: dict[str, Path], rounds: int, home: Path) -> Samples:
    samples = Samples()
    with contextlib.ExitStack() as stack:
        meshes = {}
        for label, zygote in (("zygote", True), ("no zygote", False)):
            meshes[label] = stack.enter_context(
                contextlib.closing(BenchMesh(home / label.replace(" ", "-"), models, zygote=zygote))
            )
        can_drop = drop_file_cache()

        def take(condition: str, model: str, mesh: BenchMesh) -> None:
            ttft, phases = mesh.ttft(model)
            samples.ttft[model, condition].append(ttft)
            for phase, duration in phases.items():
                samples.phases[model, condition][phase].append(duration)

        for model in models:
            for label, mesh in meshes.items():
                take(f"first start, {label}", model, mesh)
        for number in range(rounds):
            for model, path in models.items():
                print(f"round {number + 1}/{rounds}: {model}", file=sys.stderr)
                for cache in _caches(can_drop):
                    samples.ttft[model, f"transformers, {cache} cache"].append(peer_ttft(path))
                    for label, mesh in meshes.items():
                        mesh.thaw("sleep", model)
                        if cache == "dropped":
                            drop_file_cache()
                        take(f"{label}, {cache} cache", model, mesh)
                for label, mesh in meshes.items():
                    take(f"warm, {label}", model, mesh)
    return samples


def _caches(can_drop: bool) -> Iterator[str]:
    yield "warm"
    if can_drop:
        drop_file_cache()
        yield "dropped"


def figures_of(samples: Samples) -> dict[str, float]:
    figures: dict[str, float] = {}
    for (model, condition), values in samples.ttft.items():
        name = f"{model}.{condition}".replace(", ", ".").replace(" ", "_")
        figures[f"{name}.ttft_ms"] = median(values)
        for phase, durations in samples.phases[model, condition].items():
            figures[f"{name}.{phase}_ms"] = median(durations)
        for cache in ("warm", "dropped"):
            peer = samples.ttft.get((model, f"transformers, {cache} cache"))
            if peer and condition == f"zygote, {cache} cache":
                figures[f"{model}.{cache}_cache.speedup_over_transformers"] = median(peer) / median(values)
    return figures


def show(samples: Samples) -> None:
    table = Table("model", "condition", "TTFT ms", "critical path, median ms", title="Cold TTFT (median and range)")
    for (model, condition), values in sorted(samples.ttft.items()):
        phases = samples.phases[model, condition]
        path = ", ".join(f"{p} {median(d):.0f}" for p, d in sorted(phases.items(), key=lambda i: -median(i[1])) if median(d) >= 0.5)
        table.add_row(model, condition, spread(values), path)
    Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default="5m,60m,250m")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    print(json.dumps(machine()), file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory:
        root = Path(directory)
        models = {f"demo-{size}": make_demo_model(root / f"demo-{size}", size) for size in options.models.split(",")}
        samples = measure(models, options.rounds, root)
    show(samples)
    figures = figures_of(samples)
    for name, value in figures.items():
        if name.endswith("speedup_over_transformers"):
            print(f"{name}: {value:.1f} times as fast")
    write(options.json, figures)


if __name__ == "__main__":
    main()
