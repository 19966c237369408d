"""The loader against fio and its peers, on one sharded bfloat16 checkpoint in Llama's shapes.

    python -m bench.loader [--bytes 3.5GB] [--rounds N] [--directory DIR] [--peers-python PYTHON] [--json PATH]

Each round takes every case once, in an order drawn anew, each in a fresh process (bench/loader_case.py says what is timed): with the files
out of the page cache (posix_fadvise) or, for the cases called so, in it. Before each cold case all files are read once past the cache: a disk
that lends bursts then has none left for whoever comes next. The limit is fio with O_DIRECT at the setting with the best median. GB are 10^9
bytes. fastsafetensors and runai-model-streamer are taken if `--peers-python` (an environment that has them and torch) can import them.

"thaw" reads into a pool whose chunks have memory already, as in a loader that has served before or was told THAW_DRAM_READY_BYTES; "thaw, fresh
memory" takes it from the kernel meanwhile, as the peers do. "step" 1 to 5 are the ablation, each with all those before it. Then
bench/loader_service.py measures a loader process: the DRAM tier, and the same checkpoint from an HTTP server. Everything written is removed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.loader_case import MODULES
from bench.loader_service import dram, remote
from bench.report import machine, median, write
from thaw.config.units import parse_size

FIO_SETTINGS = ((1, 32), (4, 8), (16, 4), (16, 8))
"""Block size in MiB and queue depth."""
MB = 1024 * 1024
_HIDDEN, _INNER, _KV, _VOCAB = 2048, 5632, 512, 32000


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
ABLATION = (
    Case("step 1: tensor by tensor", "whole_files"),
    Case("step 2: bulk", "thaw_pool", (("threads", 1), ("direct", 0))),
    Case("step 3: direct I/O", "thaw_pool", (("threads", 1),)),
    Case("step 4: threads", "thaw_pool"),
    Case("step 5: pre-faulted pool", "thaw_pool", (READY,)),
    *(Case(f"thaw, {n} threads", "thaw_pool", (READY, ("threads", n))) for n in (2, 8)),
    Case("thaw, 4 MB reads", "thaw_pool", (READY, ("chunk_bytes", 4 * MB))),
)


@dataclass
class Samples:
    gb_per_s: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: list[float] = field(default_factory=list)


def shapes(total: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors in Llama's shapes until their bfloat16 bytes reach `total`."""
    layer = {
        "input_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_KV, _HIDDEN),
        "self_attn.v_proj": (_KV, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
        "post_attention_layernorm": (_HIDDEN,),
    }
    yield "model.embed_tokens.weight", (_VOCAB, _HIDDEN)
    left, number = total - 4 * _VOCAB * _HIDDEN, 0
    while left > 0:
        for name, shape in layer.items():
            yield f"model.layers.{number}.{name}.weight", shape
            left -= 2 * int(np.prod(shape))
        number += 1
    yield "lm_head.weight", (_VOCAB, _HIDDEN)


def write_checkpoint(directory: Path, total: int) -> list[Path]:
    """Two shards of random bytes and their index."""
    tensors = list(shapes(total))
    half = len(tensors) // 2
    parts = {"model-00001-of-00002.safetensors": tensors[:half], "model-00002-of-00002.safetensors": tensors[half:]}
    generator = np.random.default_rng(0)
    for file, part in parts.items():
        header: dict[str, Any] = {}
        at = 0
        for name, shape in part:
            end = at + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
            at = end
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (directory / file).open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            for start in range(0, at, 64 * MB):
                out.write(generator.bytes(min(64 * MB, at - start)))
            os.fsync(out.fileno())
    weight_map = {name: file for file, part in parts.items() for name, _ in part}
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [directory / name for name in parts]


def set_cache(files: list[Path], *, warm: bool) -> None:
    """Have the page cache hold all of `files`, or nothing of them."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            if warm:
                while file.read(16 * MB):
                    pass
            else:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def level(files: list[Path]) -> None:
    """Use up what the disk may lend for a while: shared and virtual disks give bursts, which would go to the case that comes after a rest."""
    with mmap.mmap(-1, 16 * MB) as room, memoryview(room) as into:
        for path in files:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                at = 0
                while got := os.preadv(fd, [into], at):
                    at += got
                    if at % mmap.PAGESIZE:
                        break
            finally:
                os.close(fd)


def run_fio(files: list[Path], block: int, depth: int) -> tuple[float, float]:
    """(bytes per second, CPU seconds)."""
    command = ["fio", "--name=limit", f"--filename={':'.join(map(str, files))}", "--file_service_type=sequential"]
    command += ["--rw=read", "--readonly", "--direct=1", "--ioengine=libaio", f"--bs={block}m", f"--iodepth={depth}"]
    done = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return float(job["read"]["bw_bytes"]), cpu


def run_case(case: Case, files: list[Path], python: str) -> dict[str, float]:
    order = {"loader": case.loader, "files": [str(f.with_suffix(case.suffix)) for f in files], "options": dict(case.options)}
    command = [python, "-m", "bench.loader_case", json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{case.name}: {done.stderr.strip()[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def cases(peers_python: str) -> list[Case]:
    found = [
        Case("thaw", "thaw_pool", (READY,)),
        Case("thaw, fresh memory", "thaw_pool"),
        Case("thaw load_tensors", "thaw_tensors"),
        *ABLATION,
    ]
    for peer in PEERS:
        if peer in MODULES:
            probe = [peers_python, "-m", "bench.loader_case", json.dumps({"loader": peer, "probe": True})]
            if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
                print(f"{peer} is left out: {peers_python} cannot import {MODULES[peer]} (see --peers-python)", file=sys.stderr)
                continue
        found.append(Case(peer, peer))
    warm = [Case(f"{c.name}, page cache", c.loader, c.options, warm=True) for c in found if c not in ABLATION]
    return [*found, *warm]


def measure(files: list[Path], rounds: int, peers_python: str) -> dict[str, Samples]:
    samples: dict[str, Samples] = defaultdict(Samples)
    total = sum(f.stat().st_size for f in files)
    todo: list[Case | tuple[int, int]] = [*cases(peers_python)]
    if shutil.which("fio"):
        todo += FIO_SETTINGS
    else:
        print("fio is missing, so there is no limit to compare with (apt-get install fio)", file=sys.stderr)
    checksums: set[float] = set()
    for number in range(rounds):
        random.Random(number).shuffle(todo)
        for case in todo:
            name = case.name if isinstance(case, Case) else "fio, {} MB reads, {} at once".format(*case)
            print(f"round {number + 1}/{rounds}: {name} (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
            set_cache([*files, *(f.with_suffix(".bin") for f in files)], warm=False)
            if isinstance(case, Case) and case.warm:
                set_cache([f.with_suffix(case.suffix) for f in files], warm=True)
            else:
                level(files)
            if not isinstance(case, Case):
                speed, cpu = run_fio(files, *case)
                samples[name].gb_per_s.append(speed / 1e9)
                samples[name].cpu_seconds.append(cpu)
                continue
            got = run_case(case, files, peers_python if case.loader in MODULES else sys.executable)
            checksums.add(got["checksum"])
            if len(checksums) != 1:
                raise RuntimeError(f"{case.name} read other bytes than those before it")
            samples[case.name].gb_per_s.append(total / got["seconds"] / 1e9)
            samples[case.name].cpu_seconds.append(got["cpu_seconds"])
            samples[case.name].peak_bytes.append(got["peak_bytes"])
    limits = [samples.pop(name) for name in [*samples] if name.startswith("fio")]
    if limits:
        samples["fio"] = max(limits, key=lambda limit: median(limit.gb_per_s))
    return samples


def figures_of(samples: dict[str, Samples]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, s in samples.items():
        key = name.replace(", ", ".").replace(" ", "_")
        figures[f"{key}.gb_per_s"] = median(s.gb_per_s)
        figures[f"{key}.cpu_seconds"] = median(s.cpu_seconds)
        if s.peak_bytes:
            figures[f"{key}.peak_gb"] = median(s.peak_bytes) / 1e9
    for peer in ("fio", *PEERS):
        for suffix, key in (("", "cold"), (", page cache", "page_cache")):
            if f"{peer}{suffix}" in samples:
                ours, theirs = samples[f"thaw{suffix}"].gb_per_s, samples[f"{peer}{suffix}"].gb_per_s
                figures[f"thaw_over_{peer}.{key}"] = median(ours) / median(theirs)
    return figures


def remote_figures(files: list[Path], rounds: int) -> dict[str, float]:
    """Bandwidths, and seconds where the name says so, of a model that comes from an HTTP server on this host."""
    total, found = sum(f.stat().st_size for f in files), {name: median(values) for name, values in remote(files, rounds).items()}
    figures = {f"remote.{name}_gb_per_s": total / found[name] / 1e9 for name in REMOTE_WAYS}
    figures["remote.thaw_over_download"] = found["download"] / found["thaw"]
    figures["remote.thaw_first_tensor_s"] = found["thaw_first_tensor"]
    figures["remote.thaw_cores"] = found["thaw_cpu"] / found["thaw"]
    return figures


def show(samples: dict[str, Samples]) -> None:
    table = Table("loader", "GB/s", "CPU s", "peak GB", title="Loads: median (least to most), CPU seconds and peak memory")
    for name, s in sorted(samples.items(), key=lambda item: ("page cache" in item[0], -median(item[1].gb_per_s))):
        speed = f"{median(s.gb_per_s):.2f} ({min(s.gb_per_s):.2f} to {max(s.gb_per_s):.2f})"
        peak = f"{median(s.peak_bytes) / 1e9:.2f}" if s.peak_bytes else ""
        table.add_row(name, speed, f"{median(s.cpu_seconds):.2f}", peak)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=parse_size, default=parse_size("3.5GB"), help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; the temporary directory by default")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    print(json.dumps(machine()), file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="thaw-bench-", dir=options.directory) as directory:
        checkpoint = Path(directory) / "model"
        checkpoint.mkdir()
        files = write_checkpoint(checkpoint, options.bytes)
        run_case(Case("torch.save", "save_as_torch"), files, sys.executable)
        samples = measure(files, options.rounds, options.peers_python)
        for path in files:
            path.with_suffix(".bin").unlink()
        print("the DRAM tier and an HTTP server, through a loader process", file=sys.stderr)
        figures = figures_of(samples) | dram(files, options.rounds) | remote_figures(files, options.rounds)
    show(samples)
    for name, value in figures.items():
        if name.startswith(("dram_tier.", "remote.")):
            print(f"{name}: {value:.3f}")
    for name, value in figures.items():
        if name.startswith("thaw_over_"):
            print(f"{name}: {value:.2f}")
    write(options.json, figures)


if __name__ == "__main__":
    main()
