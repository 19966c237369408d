"""Suspended engines against cold ones: time to the first token of vLLM, llama.cpp and the built-in
engine, in the same run.

    python -m bench.hot_swap [--device cuda:0] [--rounds N] [--colds N]
        [--engines builtin,vllm,llamacpp] [--gguf FILE]
                             [--parts swap,cold,turns,size,large] [--json PATH]

`swap`: for each engine, on one mesh: its first request from cold; then, per round, suspended (how
long, how much freed) and asked again; decoding speed before and after. `cold`: on a second mesh,
where suspending is off: cold starts after an eviction. `turns`: on a third, whose device holds one
instance only: two models asked in turn. TTFT is what a client measures: request sent → first text
received. On cpu also `size`: page-out of 0.5 to 3 GiB beside what the disk writes
(suspend_size.py), and `large`: as `swap`, vLLM with some 3 GB. With `--json` the figures of parts
that are not asked for stay. vLLM and llama.cpp run from the environments that THAW_VLLM_PYTHON and
THAW_LLAMACPP_PYTHON name; without one of them the engine is left out. Needs swap and the right to
use it, or on a GPU CUDA's checkpoint (`thaw doctor`). There what is restored per second is set
against copies from page-locked memory, measured in the same run. Without the GPU that is asked for:
one line, status 2.
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from bench.report import median, spread, write
from bench.suspend_size import beside_the_disk, sizes
from shared.errors import DeviceMissing
from shared.ports import free_port
from thaw.demo.models import make_demo_model

MIB = 1 << 20
DEVICE, PINNED = "device", "pinned_copy_gb_per_s"
PROMPT = "Say something about winter."
SOME_TOKENS, MANY_TOKENS = 64, 256
TOKENS = {"builtin": 48, "vllm_large": 16}
"""Whose model is larger than the others'."""
TURNS = 6
MEMORY = {"cpu": {"vllm": 3500 * MIB, "llamacpp": 600 * MIB}, "cuda": {"vllm": 16_000 * MIB, "llamacpp": 2000 * MIB}}
"""First reservations for the demo model; that of the built-in engine is computed."""
BUDGET = {"cpu": 6000 * MIB, "cuda": 24_000 * MIB}
NO_DEVICE = 2
PARTS = ("swap", "cold", "turns", "size", "large")
SIZE, LARGE = "size", "vllm_large"
LARGE_MEMORY, LARGE_KV = 5500 * MIB, 256 * MIB


@dataclass
class Figures:
    """Values by (engine, what), in the unit that the name ends with."""

    values: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, engine: str, what: str, value: float) -> None:
        self.values[engine, what].append(value)
        print(f"{engine} {what} {value:.1f}", file=sys.stderr)

    def get_values(self, engine: str, what: str) -> list[float]:
        return self.values.get((engine, what), [])


class SwapMesh:
    """A mesh with one model per entry of `models`, all kept until they are stopped."""

    def __init__(
        self,
        home: Path,
        models: list[dict[str, Any]],
        device: str,
        budget: int,
        *,
        suspend: bool,
        node: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the mesh.

        Args:
            home: Its state directory.
            models: Entries of thaw.yaml.
            device: The node's device.
            budget: Bytes of the device.
            suspend: Whether engines may be suspended.
            node: The node's entry in thaw.yaml, in place of one with `device` and `budget`.
            environment: More variables for the services.
        """
        self.environment = {
            **os.environ,
            "THAW_HOME": str(home),
            "THAW_SUSPEND": "auto" if suspend else "off",
            **(environment or {}),
        }
        config = home.parent / f"{home.name}.yaml"
        entries = [{**m, "keep_alive": -1} for m in models]
        nodes = {"node-0": dict(node) if node is not None else {device: f"{budget // MIB}MiB"}}
        config.write_text(yaml.safe_dump({"mesh": {"port": free_port(), "nodes": nodes}, "models": entries}))
        self.http = httpx.Client(base_url=str(self.thaw("up", "--detach", "--config", str(config))["endpoint"]), timeout=600)

    def thaw(self, *arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "thaw", *arguments, "--json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def ask(self, model: str, tokens: int = 1) -> tuple[float, float, str]:
        """Milliseconds to the first text and to the last, and the greedy text."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        started = time.perf_counter()
        first, text = 0.0, ""
        with self.http.stream("POST", "/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {") and (choices := json.loads(line[6:]).get("choices")):
                    first = first or (time.perf_counter() - started) * 1e3
                    text += choices[0].get("text") or ""
        if not first:
            raise RuntimeError(f"{model} answers nothing: see `thaw logs`")
        return first, (time.perf_counter() - started) * 1e3, text

    def decoding(self, model: str) -> float:
        """Return tokens per second after the first, by the extra time of a long response.

        The comparison is a response of one token. The arrival times of pieces say little: while an
        engine computes on every core its own server waits, and vLLM's then puts all tokens
        generated meanwhile into one event.
        """
        tokens = TOKENS.get(model, MANY_TOKENS)
        one = median([self.ask(model)[1] for _ in range(3)])
        return (tokens - 1) / max(self.ask(model, tokens)[1] - one, 1e-3) * 1e3

    def instance(self, model: str) -> dict[str, Any]:
        """The newest of the model's instances."""
        found: dict[str, Any] = [i for i in self.thaw("ps")["instances"] if i["model"] == model][-1]
        return found

    def close(self) -> None:
        self.http.close()
        self.thaw("down")


def swap(figures: Figures, mesh: SwapMesh, engine: str, rounds: int) -> None:
    """From cold to ready, and then suspended and resumed so many times."""
    figures.add(engine, "first_start_ttft_ms", mesh.ask(engine)[0])
    text = mesh.ask(engine, SOME_TOKENS)[2]
    for _ in range(3):
        figures.add(engine, "decode_before_tokens_per_s", mesh.decoding(engine))
    for number in range(rounds):
        mesh.thaw("sleep", engine)
        seen = mesh.instance(engine)
        if seen["state"] not in ("suspended", "asleep"):
            print(f"{engine} was stopped, not suspended: {seen['cannot_suspend']}", file=sys.stderr)
            break
        order = "first" if number == 0 else "later"
        figures.add(engine, f"suspend_{order}_ms", seen["last_suspend"]["took_ms"])
        left = seen["reserved_bytes"]
        if number == 0:
            freed = seen["freed_by_last_suspend_bytes"]
            figures.add(engine, "freed_mib", freed / MIB)
            figures.add(engine, "freed_part", freed / (freed + left))
        took = mesh.ask(engine)[0]
        resumed = mesh.instance(engine)["last_resume"]
        if resumed is None:
            print(f"{engine} was started cold in {took:.0f} ms: that was predicted to be sooner than to resume it", file=sys.stderr)
            break
        figures.add(engine, f"resume_{order}_ttft_ms", took)
        figures.add(engine, f"resume_{order}_ms", resumed["took_ms"])
    else:
        for _ in range(3):
            figures.add(engine, "decode_after_tokens_per_s", mesh.decoding(engine))
    if mesh.ask(engine, SOME_TOKENS)[2] != text:
        raise RuntimeError(f"{engine} answers otherwise than before it was suspended")


def measure_cold(figures: Figures, mesh: SwapMesh, engine: str, rounds: int) -> None:
    for _ in range(rounds):
        mesh.thaw("sleep", engine)
        figures.add(engine, "cold_ttft_ms", mesh.ask(engine)[0])


def ping_pong(figures: Figures, home: Path, engine: str, model: dict[str, Any], device: str) -> None:
    """Two models of one engine in turn, on a device that holds one of them."""
    pair = [{**model, "name": "ping"}, {**model, "name": "pong"}]
    budget = int(model.get("memory", 900 * MIB) * 1.2)
    with contextlib.closing(SwapMesh(home, pair, device, budget, suspend=True)) as mesh:
        for name in ("ping", "pong"):
            mesh.ask(name)
        for turn in range(TURNS):
            figures.add(engine, "ping_pong_ttft_ms", mesh.ask(("ping", "pong")[turn % 2])[0])


def models(engines: list[str], home: Path, gguf: Path | None, kind: str) -> dict[str, dict[str, Any]]:
    """Entries of thaw.yaml by engine; an engine that is not there is left out."""
    small = make_demo_model(home / "5m", "5m")
    found: dict[str, dict[str, Any]] = {}
    for engine in engines:
        entry: dict[str, Any] = {"name": engine, "source": str(small), "max_model_len": 1024}
        if engine == "builtin":
            found[engine] = {**entry, "source": str(make_demo_model(home / "250m", "250m"))}
            continue
        if not os.environ.get(f"THAW_{engine.upper()}_PYTHON") or (engine == "llamacpp" and gguf is None):
            print(f"{engine} is left out: THAW_{engine.upper()}_PYTHON (or --gguf) is not given", file=sys.stderr)
            continue
        source = str(gguf) if engine == "llamacpp" else str(small)
        found[engine] = {**entry, "source": source, "engine": engine, "memory": MEMORY[kind][engine]}
    return found


def measure_large(figures: Figures, home: Path, rounds: int) -> None:
    """Measure vLLM with a model of 250 million parameters in float32.

    vLLM keeps more than one copy of it on cpu.
    """
    if not os.environ.get("THAW_VLLM_PYTHON"):
        print("vLLM with 3 GB is left out: THAW_VLLM_PYTHON is not given", file=sys.stderr)
        return
    source = str(make_demo_model(home / "large-250m", "250m"))
    of_engine = {"engine": "vllm", "dtype": "float32", "engine_args": {"kv_cache_bytes": LARGE_KV}}
    entry = {"name": LARGE, "source": source, "max_model_len": 1024, "memory": LARGE_MEMORY, **of_engine}
    with contextlib.closing(SwapMesh(home / "large", [entry], "cpu:0", LARGE_MEMORY, suspend=True)) as mesh:
        swap(figures, mesh, LARGE, rounds)


def summary(figures: Figures) -> dict[str, float]:
    found = {f"{engine}.{what}": median(values) for (engine, what), values in figures.values.items()}
    for engine in {e for e, _ in figures.values}:
        cold = figures.get_values(engine, "cold_ttft_ms") or figures.get_values(engine, "first_start_ttft_ms")
        later = figures.get_values(engine, "resume_later_ttft_ms") or figures.get_values(engine, "resume_first_ttft_ms")
        if cold and later:
            found[f"{engine}.resume_speedup_over_cold"] = median(cold) / median(later)
        before, after = (
            figures.get_values(engine, "decode_before_tokens_per_s"),
            figures.get_values(engine, "decode_after_tokens_per_s"),
        )
        if before and after:
            found[f"{engine}.decode_after_over_before"] = median(after) / median(before)
        took = figures.get_values(engine, "resume_later_ms")
        if figures.get_values(DEVICE, PINNED) and took:
            found[f"{engine}.restored_gb_per_s"] = median(figures.get_values(engine, "freed_mib")) * MIB / median(took) / 1e6
            found[f"{engine}.restored_over_pinned_copy"] = found[f"{engine}.restored_gb_per_s"] / median(
                figures.get_values(DEVICE, PINNED)
            )
    beside = beside_the_disk(lambda what: figures.get_values(SIZE, what), median)
    return found | {f"{SIZE}.{what}": value for what, value in beside.items()}


def pinned_copies(index: int) -> float:
    """GB/s of copies from page-locked memory to GPU `index`. Raises `DeviceMissing`."""
    from weights.devices.cuda_runtime import load_cuda
    from weights.devices.probe import measure

    driver = load_cuda()
    if index >= driver.count():
        raise DeviceMissing(f"there are {driver.count()} GPUs")
    return max(p.bytes_per_second for p in measure(driver, driver.facts(index))) / 1e9


def show(figures: Figures, found: dict[str, float]) -> None:
    table = Table("engine", "figure", "median and range", title="Hot swap")
    for (engine, what), values in sorted(figures.values.items()):
        table.add_row(engine, what, spread(values))
    for name in sorted(n for n in found if "_over_" in n):
        engine, _, what = name.partition(".")
        table.add_row(engine, what, f"{found[name]:.2f}")
    Console(width=140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--colds", type=int, default=2)
    parser.add_argument("--engines", default="builtin,vllm,llamacpp")
    parser.add_argument("--gguf", type=Path, default=None)
    parser.add_argument("--device", default="cpu:0", help="cpu:0 or cuda:N")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    figures = Figures()
    kind, _, number = options.device.partition(":")
    if kind == "cuda":
        try:
            figures.add(DEVICE, PINNED, pinned_copies(int(number)))
        except DeviceMissing as e:
            print(f"nothing measured: {e.message}", file=sys.stderr)
            return NO_DEVICE
    parts = options.parts.split(",")
    if kind == "cpu" and SIZE in parts:
        sizes(lambda what, value: figures.add(SIZE, what, value), options.rounds)
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory:
        home = Path(directory)
        if kind == "cpu" and "large" in parts:
            measure_large(figures, home, options.rounds)
        if {"swap", "cold", "turns"} & set(parts):
            swapping(figures, home, options, kind, parts)
    found = summary(figures)
    show(figures, found)
    if options.json is not None:
        write(options.json, found, add=set(parts) != set(PARTS))
    return 0


def swapping(figures: Figures, home: Path, options: argparse.Namespace, kind: str, parts: list[str]) -> None:
    """The parts that every engine takes part in."""
    entries = models(options.engines.split(","), home, options.gguf, kind)
    where = (list(entries.values()), options.device, BUDGET[kind])
    if "swap" in parts:
        with contextlib.closing(SwapMesh(home / "swap", *where, suspend=True)) as mesh:
            for engine in entries:
                swap(figures, mesh, engine, options.rounds)
                mesh.thaw("sleep", engine)
    if "cold" in parts and options.colds:
        with contextlib.closing(SwapMesh(home / "cold", *where, suspend=False)) as mesh:
            for engine in entries:
                mesh.ask(engine)
                measure_cold(figures, mesh, engine, options.colds)
                mesh.thaw("sleep", engine)
    for engine, entry in entries.items() if "turns" in parts else ():
        ping_pong(figures, home / f"pong-{engine}", engine, entry, options.device)


if __name__ == "__main__":
    sys.exit(main())
