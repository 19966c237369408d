"""Computing while loading: the time to the first token, by model, prompt and copy group.

    python -m bench.overlap [--sizes 60m 250m] [--prompts 128 512] [--groups 2 8 32 128 1024]
        [--rounds 5] [--threads 1] [--touched] [--json PATH]

A loader process copies a model to a separate cpu device, and this process computes a prompt on the
device's pages with the engine's code. The link is PACED: its bandwidth is set so that the load
takes as long as the prefill, where an overlap saves most. A round measures, in alternating order:

    waiting     the load, then the warm-up and the prefill
    overlapped  layers compute as their units arrive

Both begin with the load, after the loader has read the index, and end with the first token; the
process and the tokenizer are there. `load` and `prefill` are measured in the waiting way. The
figures are medians over the rounds, and of the rounds' ratios. A first token that differs between
the ways ends the run with an error. The sweep repeats the overlapped way with each group size (MiB)
for the largest model and longest prompt (the shape of Torpor's Fig. 7).

The device's pages are fresh: the kernel zeroes each during the copy, which may take longer than the
link. With --touched they have been used before, as on a node that has served for a while.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.overlap_loader import DEVICE, INSTANCE, NODE
from bench.report import median, write
from services.engine.generation.runner import Row, Runner
from services.engine.model import loading
from services.engine.model.architectures import ModelCache
from services.engine.model.arriving import ArrivingPages, Follower
from services.engine.model.bound_model import bind_model
from services.engine.model.model_files import read_files
from services.engine.settings import EngineSettings
from shared.contracts.engine import EngineStart
from shared.contracts.loader import WeightsAttached
from shared.contracts.loader_socket import loader_socket
from shared.contracts.models import ModelCard
from shared.contracts.segment import PagesHandle
from thaw.demo.models import make_demo_model

MIB = 1 << 20
WAYS = ("waiting", "overlapped")


@dataclass(frozen=True)
class Case:
    model: Path
    prompt: list[int]
    group_bytes: int
    bytes_per_second: float
    touched: bool


@dataclass(frozen=True)
class Measured:
    """Seconds from the index on: of the first token, and of its parts; the token."""

    ttft: float
    load: float
    bind: float
    prefill: float
    token: int


class LoaderProcess:
    """One load. The device is empty, and the file is in the page cache."""

    def __init__(self, case: Case, home: Path) -> None:
        command = [sys.executable, "-m", "bench.overlap_loader", str(home), str(case.model), str(case.group_bytes)]
        self._process = subprocess.Popen(
            [*command, str(case.bytes_per_second), str(int(case.touched))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.card = ModelCard.model_validate_json(self._line())
        self.complete: WeightsAttached | None = None
        self.completed_at = 0.0

    def begin(self) -> WeightsAttached:
        """Begin the load; return when the index is there."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = WeightsAttached.model_validate_json(self._line())
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()
        return found

    def wait(self) -> WeightsAttached:
        self._waiter.join()
        assert self.complete is not None, "the loader failed"
        return self.complete

    def _wait(self) -> None:
        self.complete = WeightsAttached.model_validate_json(self._line())
        self.completed_at = time.monotonic()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the loader process ended; its error is above")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def loader_of(case: Case) -> Iterator[tuple[LoaderProcess, Path]]:
    with tempfile.TemporaryDirectory(prefix="thaw-ov-") as home:
        process = LoaderProcess(case, Path(home))
        try:
            yield process, loader_socket(Path(home) / "nodes" / NODE)
        finally:
            process.close()


def measure(case: Case, way: str) -> Measured:
    settings = EngineSettings()
    with loader_of(case) as (loader, socket):
        start = EngineStart(
            instance_id=INSTANCE, node=NODE, card=loader.card, device=DEVICE, separate_memory=True, kv_bytes=1 << 30, log_path=""
        )
        files = read_files(case.model, start, ModelCache())
        index = loader.begin()
        began = time.monotonic()
        bound = bind_model(case.model, index, start, ModelCache())
        bound_at = time.monotonic()
        if way == "waiting":
            attached = loader.wait()
            ready = loading.complete(bound, files, start, settings, attached.handle)
            computing = time.monotonic()
            token = first_token(ready.runner, case.prompt)
        else:
            laid_out = threading.Event()
            follower = Follower(socket, INSTANCE, index.weights_id, lambda _: laid_out.set())
            laid_out.wait()
            ready, _ = loading.begin(bound, files, start, settings, follower.arriving, follower.pages)
            computing = time.monotonic()
            token = first_token(ready.runner, case.prompt)
            attached = loader.wait()
            assert isinstance(attached.handle, PagesHandle)
            assert isinstance(follower.pages, ArrivingPages)
            follower.end()
            follower.pages.map_all(attached.handle)  # as the engine does before results go out
        ended = time.monotonic()
        return Measured(ended - began, loader.completed_at - began, bound_at - began, ended - computing, token)


def first_token(runner: Runner | None, prompt: list[int]) -> int:
    assert runner is not None
    return int(runner.forward([Row(runner.new_state(), 0, prompt)]).argmax(-1)[0])


def balance_link(case: Case) -> Case:
    """Return the case with a link that is as slow as the prefill."""
    found = measure(case, "waiting")
    nbytes = sum(f.stat().st_size for f in case.model.glob("*.safetensors"))
    return replace(case, bytes_per_second=nbytes / found.prefill)


def compare_ways(case: Case, rounds: int) -> dict[str, float]:
    """Measure both ways; return milliseconds and ratios, as medians."""
    found: dict[str, list[Measured]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            found[way].append(measure(case, way))
    if len({m.token for way in WAYS for m in found[way]}) != 1:
        raise SystemExit("the first tokens differ")
    waiting, overlapped = found["waiting"], found["overlapped"]
    pairs = list(zip(waiting, overlapped, strict=True))
    return {
        "paced_mb_per_s": case.bytes_per_second / 1e6,
        "load_ms": median([m.load for m in waiting]) * 1e3,
        "prefill_ms": median([m.prefill for m in waiting]) * 1e3,
        "bind_ms": median([m.bind for m in waiting]) * 1e3,
        "waiting_ms": median([m.ttft for m in waiting]) * 1e3,
        "overlapped_ms": median([m.ttft for m in overlapped]) * 1e3,
        "waiting_over_max": median([w.ttft / max(w.load, w.prefill) for w in waiting]),
        "overlapped_over_max": median([o.ttft / max(w.load, w.prefill) for w, o in pairs]),
        "overlapped_over_waiting": median([o.ttft / w.ttft for w, o in pairs]),
    }


def sweep_groups(case: Case, groups: list[int], rounds: int) -> dict[str, float]:
    """Measure the overlapped way by group size in turns; return milliseconds."""
    found: dict[int, list[float]] = {group: [] for group in groups}
    for number in range(rounds):
        for group in groups if number % 2 else reversed(groups):
            one = replace(case, group_bytes=group * MIB)
            found[group].append(measure(one, "overlapped").ttft)
    return {f"{group}_mib_ms": median(times) * 1e3 for group, times in found.items()}


def prompt_of(length: int, vocabulary: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(3, vocabulary) for _ in range(length)]


def run(args: argparse.Namespace, models: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    last: Case | None = None
    for size in args.sizes:
        model = make_demo_model(models / size, size)
        for length in args.prompts:
            last = balance_link(Case(model, prompt_of(length, 8192), 2 * MIB, 0.0, args.touched))
            found = compare_ways(last, args.rounds)
            print(f"{size}, {length} tokens, paced: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)
            figures |= {f"paced.{size}.{length}.{name}": value for name, value in found.items()}
    if last is not None and args.groups:
        sweep = sweep_groups(last, args.groups, args.rounds)
        print("groups, paced: " + ", ".join(f"{k} {v:.4g}" for k, v in sweep.items()), flush=True)
        figures |= {f"paced.group.{name}": value for name, value in sweep.items()}
    return figures


def arguments(text: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description="Time computing while loading.")
    parser.add_argument("--sizes", nargs="+", default=["60m", "250m"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--groups", nargs="*", type=int, default=[2, 8, 32, 128, 1024], metavar="MIB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="computing threads")
    parser.add_argument("--touched", action="store_true", help="the device's pages have been used before")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(text)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="thaw-overlap-") as models:
        write(args.json, run(args, Path(models)))


if __name__ == "__main__":
    main()
