"""LoRA adapters: what a batch of several costs beside the base alone, and how fast a large one is
loaded.

    python -m bench.lora [--size 60m] [--rows 8] [--rounds N] [--bytes 1GB] [--part PART …]
        [--directory DIR] [--json PATH]

Batch: decode steps of ROWS sequences on a demo model, through the engine's own runner. The peer,
where it can be imported, is PEFT on the same weights: its mixed batches (`adapter_names`), and one
pass for each adapter after `set_adapter`. Each round takes every case once, in an new random order;
a round's figure is the fastest of its steps, in CPU time of the one computing thread: what other
work disturbs least. Adapters are float32, as PEFT saves them, of rank 16 on all linear layers of
the blocks.

Load: an adapter of BYTES in Llama-8B's shapes by the loader and by safetensors
(bench/loader_case.py), from the disk and from the page cache, and from the node's memory, where
another instance holds it (mapped and seen as tensors). From the disk fio, at the best of its
settings, is the limit: what it is over safetensors bounds what any loader can be. `--part load`
leaves the batches out, `--part batch` the loads. GB are 10^9 bytes. Everything written is removed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache

from bench.disk import FIO_SETTINGS, Loading, level, run_fio, set_cache
from bench.loader import Case
from bench.loader_case import checksum
from bench.report import machine, median, write
from services.engine.generation import attention
from services.engine.generation.attention import PACKED
from services.engine.generation.lora_layers import LoraAdapter, LowRankPair
from services.engine.generation.runner import PackedRunner, Row
from thaw.demo.models import make_demo_model
from thaw.units import parse_size

RANK = 16
PROMPT = 64
STEPS = 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LLAMA_8B = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}
"""Inputs and outputs of each linear layer of a block."""
_BLOCKS = 32
Step = Callable[[], object]


def adapter(model: Any, seed: int) -> dict[str, LowRankPair]:
    """Random pairs for every linear layer of the blocks."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: LowRankPair(
            torch.randn(RANK, module.in_features, generator=generator) * 0.02,
            torch.randn(module.out_features, RANK, generator=generator) * 0.02,
            1.0,
        )
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in TARGETS
    }


def spread_over(rows: int, adapters: int) -> list[int | None]:
    """The adapter of each row, neighbours in turn; `adapters` 0: the base alone."""
    return [i % adapters if adapters else None for i in range(rows)]


class Ours:
    """The engine's runner."""

    def __init__(self, directory: Path, rows: int) -> None:
        attention.register()
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation=PACKED).eval()
        self.pairs = [adapter(model, seed) for seed in range(rows)]
        self._adapters = [LoraAdapter(f"a{number}", pairs) for number, pairs in enumerate(self.pairs)]
        self._runner = PackedRunner(model, torch.device("cpu"))
        self._rows = rows

    def step(self, adapters: int) -> Step:
        chosen = [None if a is None else self._adapters[a] for a in spread_over(self._rows, adapters)]
        states = [self._runner.new_state() for _ in chosen]
        prompts = [Row(s, 0, list(range(1, PROMPT + 1)), a) for s, a in zip(states, chosen, strict=True)]
        self._runner.forward(prompts)
        rows = [Row(s, PROMPT, [5], a) for s, a in zip(states, chosen, strict=True)]
        return lambda: self._runner.forward(rows)

    def forget(self) -> None:
        for made in self._adapters:
            self._runner.forget(made)


class Peft:
    """PEFT's own two ways."""

    def __init__(self, directory: Path, pairs: list[dict[str, LowRankPair]]) -> None:
        peft = importlib.import_module("peft")
        base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(TARGETS), task_type="CAUSAL_LM")
        self._model = peft.get_peft_model(base, config, adapter_name="a0").eval()
        for number in range(1, len(pairs)):
            self._model.add_adapter(f"a{number}", config)
        modules = dict(self._model.named_modules())
        with torch.no_grad():
            for number, own in enumerate(pairs):
                for name, pair in own.items():
                    module = modules[f"base_model.model.{name}"]
                    module.lora_A[f"a{number}"].weight.copy_(pair.a)
                    module.lora_B[f"a{number}"].weight.copy_(pair.b)
        self._rows = len(pairs)

    def _pass(self, rows: int, **options: Any) -> Step:
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            ids = torch.arange(1, PROMPT + 1).repeat(rows, 1)
            self._model(input_ids=ids, past_key_values=cache, use_cache=True, **options)

        def step() -> object:
            with torch.inference_mode():
                logits = self._model(input_ids=torch.full((rows, 1), 5), past_key_values=cache, use_cache=True, **options).logits
            cache.crop(-1)
            return logits

        return step

    def build_mixed_step(self, adapters: int) -> Step:
        names = ["__base__" if a is None else f"a{a}" for a in spread_over(self._rows, adapters)]
        return self._pass(self._rows, adapter_names=names)

    def switching(self, adapters: int) -> Step:
        chosen = spread_over(self._rows, adapters)
        passes = []
        for number in range(adapters):
            self._model.set_adapter(f"a{number}")
            passes.append((f"a{number}", self._pass(chosen.count(number))))

        def step() -> object:
            for name, one in passes:
                self._model.set_adapter(name)
                one()
            return None

        return step


def batch(size: str, rows: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    """CPU milliseconds of a decode step, by case."""
    model = make_demo_model(directory / "model", size)
    ours = Ours(model, rows)
    counts = sorted({1, 2, rows})
    makers: dict[str, Callable[[], Step]] = {f"thaw, {n} adapters": (lambda n=n: ours.step(n)) for n in counts}  # type: ignore[misc]  # n is bound
    makers |= {"thaw, base alone": lambda: ours.step(0), "thaw, base alone, adapters loaded": lambda: ours.step(0)}
    if importlib.util.find_spec("peft") is not None:
        peer = Peft(model, ours.pairs)
        makers |= {"peft, base alone": lambda: peer.build_mixed_step(0)}
        makers |= {f"peft mixed, {n} adapters": (lambda n=n: peer.build_mixed_step(n)) for n in counts}  # type: ignore[misc]
        makers |= {f"peft switching, {n} adapters": (lambda n=n: peer.switching(n)) for n in counts}  # type: ignore[misc]
    else:
        print("peft cannot be imported, so it is left out", file=sys.stderr)
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        for name in random.Random(number).sample(sorted(makers), len(makers)):
            if name == "thaw, base alone":
                ours.forget()
            elif name.startswith("thaw, base alone"):
                ours.step(rows)
            step = makers[name]()
            step()
            times = []
            for _ in range(STEPS):
                started = time.thread_time()
                step()
                times.append((time.thread_time() - started) * 1e3)
            samples[name].append(min(times))
        print(f"round {number + 1}/{rounds} (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    return samples


def write_adapter(directory: Path, total: int) -> Path:
    """An adapter in bfloat16 of about `total` bytes: its rank is what that takes."""
    per_rank = 2 * _BLOCKS * sum(i + o for i, o in _LLAMA_8B.values())
    rank = max(1, round(total / per_rank))
    header: dict[str, Any] = {}
    at = 0
    for name, shape in _tensors(rank):
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    generator = np.random.default_rng(0)
    directory.mkdir()
    path = directory / "adapter_model.safetensors"
    with path.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        for start in range(0, at, 1 << 26):
            out.write(generator.bytes(min(1 << 26, at - start)))
        os.fsync(out.fileno())
    return path


def _tensors(rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    for block in range(_BLOCKS):
        for module, (inputs, outputs) in _LLAMA_8B.items():
            name = f"base_model.model.model.layers.{block}.{module}"
            yield f"{name}.lora_A.weight", (rank, inputs)
            yield f"{name}.lora_B.weight", (outputs, rank)


def loads(total: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Milliseconds to usable tensors, by case."""
    file = write_adapter(directory / "adapter", total)
    todo: list[Case | tuple[int, int]] = [
        Case(f"{loader}{', page cache' if warm else ''}", loader, options, warm=warm)
        for loader, options in LOADERS.items()
        for warm in (False, True)
    ]
    if shutil.which("fio"):
        todo += FIO_SETTINGS
    samples: dict[str, list[float]] = defaultdict(list)
    checksums = set()
    for number in range(rounds):
        random.Random(number).shuffle(todo)
        for case in todo:
            if not isinstance(case, Case):
                set_cache([file], warm=False)
                level([file])
                samples["fio, {} MB reads, {} at once".format(*case)].append(file.stat().st_size / run_fio([file], *case)[0] * 1e3)
                continue
            with Loading(case.loader, [file], dict(case.options)) as loading:
                set_cache([file], warm=case.warm)
                if not case.warm:
                    level([file])
                got = loading.go()
            checksums.add(got["checksum"])
            samples[case.name].append(got["seconds"] * 1e3)
        print(f"round {number + 1}/{rounds} of loads (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    samples["thaw, held on the node"] = _measure_held(file, rounds, checksums)
    if len(checksums) != 1:
        raise RuntimeError("the cases read different bytes")
    if limits := [samples.pop(name) for name in [*samples] if name.startswith("fio")]:
        samples["fio"] = min(limits, key=median)
    return samples


LOADERS: dict[str, tuple[tuple[str, int], ...]] = {"thaw_pool": (("ready", 1),), "safetensors": ()}
"""With their options. Ready: the pool has been used before, so that its memory is there."""


def _measure_held(file: Path, rounds: int, checksums: set[float]) -> list[float]:
    """Measure the wait of an instance whose node holds the LoRA adapter already.

    It includes the mapping, every tensor, and the checksum of the other cases.
    """
    from services.engine.model.segment import SHARED_MEMORY, Segment
    from weights.load import load_segment

    name = f"thaw-bench-lora-{os.getpid()}"
    load_segment(file.parent, name)
    times = []
    try:
        for _ in range(rounds):
            started = time.perf_counter()
            checksums.add(checksum(Segment(name).tensors().values()))
            times.append((time.perf_counter() - started) * 1e3)
    finally:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    return times


def load_figures(loaded: dict[str, list[float]]) -> dict[str, float]:
    """Return medians in ms, and ratios to safetensors and to fio.

    "times_safetensors." is its time over ours; "fio", if present, is the limit of loads from the
    disk, and our share of it.
    """
    ms = {name: median(times) for name, times in loaded.items()}
    figures = {f"load_ms.{name}": value for name, value in ms.items()}
    figures["times_safetensors.cold"] = ms["safetensors"] / ms["thaw_pool"]
    if "fio" in ms:
        figures["times_safetensors.bound, cold"] = ms["safetensors"] / ms["fio"]
        figures["share_of_fio"] = ms["fio"] / ms["thaw_pool"]
    figures["times_safetensors.page cache"] = ms["safetensors, page cache"] / ms["thaw_pool, page cache"]
    figures["times_safetensors.held on the node"] = ms["safetensors, page cache"] / ms["thaw, held on the node"]
    return figures


def show(title: str, samples: dict[str, list[float]]) -> None:
    table = Table("case", "ms", title=title)
    for name, times in sorted(samples.items(), key=lambda item: median(item[1])):
        table.add_row(name, f"{median(times):.1f} ({min(times):.1f} to {max(times):.1f})")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="60m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=parse_size, default=parse_size("1GB"), help="of the adapter to load")
    parser.add_argument("--part", choices=("batch", "load"), action="append", default=None, help="both by default")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; the temporary directory by default")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(machine()), file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="thaw-bench-", dir=options.directory) as directory:
        parts = options.part or ("batch", "load")
        steps = batch(options.size, options.rows, options.rounds, Path(directory)) if "batch" in parts else {}
        loaded = loads(options.bytes, options.rounds, Path(directory)) if "load" in parts else {}
    figures: dict[str, float] = {}
    if steps:
        show(f"Decode step of {options.rows} sequences, {options.size}, CPU ms: median (least to most)", steps)
        figures |= {f"step_cpu_ms.{name}": median(times) for name, times in steps.items()}
        base = median(steps["thaw, base alone"])
        figures |= {f"over_base.{name}": median(times) / base for name, times in steps.items() if name.startswith("thaw")}
    if loaded:
        show("Load of an adapter: median (least to most)", loaded)
        figures |= load_figures(loaded)
    for name, value in figures.items():
        if name.startswith(("over_base", "times_", "share_")):
            print(f"{name}: {value:.2f}")
    names = {name: name.replace(", ", ".").replace(" ", "_") for name in figures}
    write(options.json, {names[name]: value for name, value in figures.items()}, add=options.part is not None)


if __name__ == "__main__":
    main()
