"""The loader against fio and its peers, on one sharded bfloat16 checkpoint in Llama's shapes.

    python -m bench.loader [--bytes 3.5GB] [--rounds N] [--pairs N] [--part PART …]
        [--directory DIR] [--peers-python PYTHON]
                           [--samples PATH] [--json PATH]

`cases`: each round takes every case once, in a new random order, each in a fresh process
(bench/loader_case.py says what is timed): with the files out of the page cache (posix_fadvise) or,
for the cases called so, in it. Before each cold load, when its process has imported and prepared
what it needs, all files are read once past the cache: a disk that lends bursts then has none left
for the next one. `limit`: fio with O_DIRECT, at the setting with the best median so far, and "thaw"
one right after the other, either first by turns, so that they see the same disk; the ratio is the
geometric mean of both orders' medians. fio's buffers are of huge pages (bench/disk.py), as the pool
is that was made ready, but for "small pages". `service`: bench/loader_service.py measures a loader
process: the DRAM tier, and the same checkpoint from an HTTP server. GB are 10^9 bytes.
fastsafetensors and runai-model-streamer run in an environment of their own, which
`python -m bench.peers` (`make peers`) installs once; `--peers-python` names another one, which has
them and torch. A peer that cannot be imported is left out.

With --samples every sample is written to a file at once, and those of earlier runs count too: a
long run can be made in pieces.

"thaw" reads into a pool whose chunks have memory already, as in a loader that has served before or
has THAW_DRAM_READY_BYTES set; "thaw, fresh memory" takes it from the kernel meanwhile, as the peers
do. "step" 1 to 5 are the ablation, each with all those before it. All that is written but for the
samples is removed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import peers
from bench.disk import FIO_SETTINGS, MB, Loading, level, run_fio, set_cache, write_checkpoint
from bench.loader_case import MODULES
from bench.loader_service import dram, remote
from bench.report import machine, median, write
from bench.samples import Samples
from thaw.units import parse_size

PARTS = ("cases", "limit", "service")


@dataclass(frozen=True)
class Case:
    name: str
    loader: str
    options: tuple[tuple[str, int], ...] = ()
    warm: bool = False

    @property
    def suffix(self) -> str:
        return ".bin" if self.loader.startswith("torch") else ".safetensors"


PEERS = ("safetensors", "torch_load", "torch_load_mmap", "fastsafetensors", "runai")
REMOTE_WAYS = ("download", "thaw", "thaw_kept_on_disk", "download_then_load")
READY = ("ready", 1)
THAW = Case("thaw", "thaw_pool", (READY,))
SMALL = Case("thaw, small pages", "thaw_pool", (READY, ("small_pages", 1)))
ABLATION = (
    Case("step 1: tensor by tensor", "whole_files"),
    Case("step 2: bulk", "thaw_pool", (("threads", 1), ("direct", 0))),
    Case("step 3: direct I/O", "thaw_pool", (("threads", 1),)),
    Case("step 4: threads", "thaw_pool"),
    Case("step 5: pre-faulted pool", "thaw_pool", (READY,)),
    *(Case(f"thaw, {n} threads", "thaw_pool", (READY, ("threads", n))) for n in (2, 8)),
    Case("thaw, 4 MB reads", "thaw_pool", (READY, ("chunk_bytes", 4 * MB))),
)


def cases(peers_python: str) -> list[Case]:
    found = [
        THAW,
        Case("thaw, fresh memory", "thaw_pool"),
        SMALL,
        Case("thaw load_tensors", "thaw_tensors"),
        *ABLATION,
    ]
    for peer in PEERS:
        if peer in MODULES:
            probe = [peers_python, "-m", "bench.loader_case", json.dumps({"loader": peer, "probe": True})]
            if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
                print(
                    f"{peer} is left out: {peers_python} cannot import {MODULES[peer]} (`python -m bench.peers` installs it)",
                    file=sys.stderr,
                )
                continue
        found.append(Case(peer, peer))
    warm = [Case(f"{c.name}, page cache", c.loader, c.options, warm=True) for c in found if c not in ABLATION]
    return [*found, *warm]


def fio_name(block: int, depth: int) -> str:
    return f"fio, {block} MB reads, {depth} at once"


class Bench:
    """One checkpoint on the disk, and what was measured with it."""

    def __init__(self, files: list[Path], samples: Samples, peers_python: str) -> None:
        self._files, self._samples, self._python = files, samples, peers_python
        self._total = sum(f.stat().st_size for f in files)
        self._checksum: float | None = None

    def cases(self, rounds: int) -> None:
        todo: list[Case | tuple[int, int]] = [*cases(self._python)]
        if shutil.which("fio"):
            todo += FIO_SETTINGS
        else:
            print("fio is missing, so there is no limit to compare with (apt-get install fio)", file=sys.stderr)
        for number in range(rounds):
            random.shuffle(todo)
            for case in todo:
                name = case.name if isinstance(case, Case) else fio_name(*case)
                print(f"round {number + 1}/{rounds}: {name} (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
                if isinstance(case, Case):
                    self._load(case, name)
                else:
                    self._fio(case, name)

    def limit(self, pairs: int) -> None:
        """Compare fio's best setting with "thaw", one right after the other.

        Either is first by turns: each finds the disk as the other has left it.
        """
        settings = [s for s in FIO_SETTINGS if self._samples.get_values(f"{fio_name(*s)}.gb_per_s")]
        best = max(settings or FIO_SETTINGS[-1:], key=lambda s: self._samples.median(f"{fio_name(*s)}.gb_per_s", 0.0))
        for number in range(pairs):
            with Loading(THAW.loader, self._files, dict(THAW.options)) as loading:
                set_cache(self._files, warm=False)
                level(self._files)
                if number % 2:
                    got = loading.go()
                fio, cpu = run_fio(self._files, *best)
                if not number % 2:
                    got = loading.go()
            thaw = self._total / got["seconds"]
            print(f"pair {number + 1}/{pairs}: {thaw / fio:.2f} (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
            self._samples.add("pairs, fio.gb_per_s", fio / 1e9)
            self._samples.add("pairs, fio.cpu_seconds", cpu)
            self._samples.add("pairs, thaw.gb_per_s", thaw / 1e9)
            self._samples.add("pairs, thaw.cpu_seconds", got["cpu_seconds"])
            self._samples.add(f"pairs, {'thaw' if number % 2 else 'fio'} first.ratio", thaw / fio)

    def service(self, rounds: int) -> None:
        for name, values in (dram(self._files, rounds) | remote(self._files, rounds)).items():
            self._samples.add(name, *values)

    def _fio(self, setting: tuple[int, int], name: str) -> None:
        set_cache(self._files, warm=False)
        level(self._files)
        speed, cpu = run_fio(self._files, *setting)
        self._samples.add(f"{name}.gb_per_s", speed / 1e9)
        self._samples.add(f"{name}.cpu_seconds", cpu)

    def _load(self, case: Case, name: str) -> None:
        files = [f.with_suffix(case.suffix) for f in self._files]
        python = self._python if case.loader in MODULES else sys.executable
        with Loading(case.loader, files, dict(case.options), python) as loading:
            set_cache([*self._files, *files], warm=False)
            if case.warm:
                set_cache(files, warm=True)
            else:
                level(self._files)
            got = loading.go()
        if self._checksum not in (None, got["checksum"]):
            raise RuntimeError(f"{name} read other bytes than those before it")
        self._checksum = got["checksum"]
        self._samples.add(f"{name}.gb_per_s", self._total / got["seconds"] / 1e9)
        self._samples.add(f"{name}.cpu_seconds", got["cpu_seconds"])
        self._samples.add(f"{name}.peak_gb", got["peak_bytes"] / 1e9)


def figures_of(samples: Samples, total: int) -> dict[str, float]:
    """Return medians, and ratios of medians of one state of the cache.

    "fio_over_" a peer bounds the speed of any loader relative to that peer.

    Args:
        total: Bytes of the checkpoint.
    """
    found = {name: samples.median(name) for name in samples.names() if not name.startswith(("dram_tier", "remote"))}
    fios = [fio_name(*s) for s in FIO_SETTINGS if f"{fio_name(*s)}.gb_per_s" in found]
    if fios:
        best = max(fios, key=lambda name: found[f"{name}.gb_per_s"])
        found |= {f"fio.{what}": found[f"{best}.{what}"] for what in ("gb_per_s", "cpu_seconds")}
    for peer in ("fio", *PEERS):
        for suffix, key in (("", "cold"), (", page cache", "page_cache")):
            theirs, ours = found.get(f"{peer}{suffix}.gb_per_s"), found.get(f"thaw{suffix}.gb_per_s")
            if theirs and ours:
                found[f"thaw_over_{peer}.{key}"] = ours / theirs
            if theirs and peer != "fio" and not suffix and "fio.gb_per_s" in found:
                found[f"fio_over_{peer}.{key}"] = found["fio.gb_per_s"] / theirs
    orders = [samples.get_values(f"pairs, {first} first.ratio") for first in ("thaw", "fio")]
    if all(orders):  # the first may find the disk rested; the mean of both orders cancels that out
        found["thaw_over_fio.by_turns"] = math.sqrt(median(orders[0]) * median(orders[1]))
    if "thaw.cpu_seconds" in found:
        found["thaw.cores"] = found["thaw.cpu_seconds"] * found["thaw.gb_per_s"] / (total / 1e9)
    found |= service_figures(samples, total)
    return {name.replace(", ", ".").replace(" ", "_"): value for name, value in found.items()}


def service_figures(samples: Samples, total: int) -> dict[str, float]:
    """Bandwidths, and seconds where the name says so, of a loader process."""
    figures: dict[str, float] = {}
    if bound := samples.get_values("dram_tier.bound_ms"):
        figures |= {"dram_tier.bound_ms": median(bound), "dram_tier.worst_bound_ms": max(bound)}
    if samples.get_values("remote.download"):
        seconds = {name: samples.median(f"remote.{name}") for name in (*REMOTE_WAYS, "thaw_cpu", "thaw_first_tensor")}
        figures |= {f"remote.{name}_gb_per_s": total / seconds[name] / 1e9 for name in REMOTE_WAYS}
        figures["remote.thaw_over_download"] = seconds["download"] / seconds["thaw"]
        figures["remote.thaw_first_tensor_s"] = seconds["thaw_first_tensor"]
        figures["remote.thaw_cores"] = seconds["thaw_cpu"] / seconds["thaw"]
    return figures


def show(samples: Samples) -> None:
    title = "Loads: median (least to most), share of fio at its best (cold), CPU seconds and peak memory"
    table = Table("loader", "GB/s", "of fio", "CPU s", "peak GB", title=title)
    limit = max(samples.median(f"{fio_name(*s)}.gb_per_s", 0.0) for s in FIO_SETTINGS)
    names = [name.removesuffix(".gb_per_s") for name in samples.names() if name.endswith(".gb_per_s")]
    for name in sorted(names, key=lambda n: ("page cache" in n, -samples.median(f"{n}.gb_per_s"))):
        speeds = samples.get_values(f"{name}.gb_per_s")
        peak = samples.get_values(f"{name}.peak_gb")
        beside = median(samples.get_values("pairs, fio.gb_per_s")) if name.startswith("pairs") else limit
        table.add_row(
            name,
            f"{median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})",
            f"{median(speeds) / beside:.2f}" if beside and "page cache" not in name else "",
            f"{samples.median(f'{name}.cpu_seconds'):.2f}",
            f"{median(peak):.2f}" if peak else "",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=parse_size, default=parse_size("3.5GB"), help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--part", choices=PARTS, action="append", default=None, help="all of them by default")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; the temporary directory by default")
    parser.add_argument(
        "--peers-python", default=peers.python() or sys.executable, help="by default that of `python -m bench.peers`"
    )
    parser.add_argument("--samples", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    parts = options.part or PARTS
    samples = Samples(options.samples)
    print(json.dumps(machine()), file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="thaw-bench-", dir=options.directory) as directory:
        checkpoint = Path(directory) / "model"
        checkpoint.mkdir()
        files = write_checkpoint(checkpoint, options.bytes)
        total = sum(f.stat().st_size for f in files)
        bench = Bench(files, samples, options.peers_python)
        if "cases" in parts:
            with Loading("save_as_torch", files, {}) as saving:
                saving.go()
            bench.cases(options.rounds)
            for path in files:
                path.with_suffix(".bin").unlink()
        if "limit" in parts:
            bench.limit(options.pairs)
        if "service" in parts:
            bench.service(options.rounds)
    show(samples)
    figures = figures_of(samples, total)
    for name, value in figures.items():
        if name.startswith(("dram_tier.", "remote.", "thaw_over_", "fio_over_", "thaw.cores")):
            print(f"{name}: {value:.3f}")
    write(options.json, figures, add=options.part is not None)


if __name__ == "__main__":
    main()
