"""When converting pays: one checkpoint in several layouts, loaded from each, and what each
conversion costs.

    python -m bench.convert [--bytes 1GB] [--rounds N] [--directory DIR] [--json PATH]

The checkpoint is random bfloat16 in Llama's shapes (bench/loader.py's). Each round takes every load
once, in a new random order, each in a fresh process, with the files out of the page cache
(posix_fadvise); the clock runs from before the first byte until a checksum over three pages of
every tensor is known. GB are 10^9 bytes of tensors. Everything written is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.disk import set_cache, write_checkpoint
from bench.loader_case import checksum
from bench.report import machine, median, write
from thaw.units import parse_size

Tensors = dict[str, torch.Tensor]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
ROWS = ("o_proj.weight", "down_proj.weight")
WHOLE = ("norm.weight", "layernorm.weight", "embed_tokens.weight")
RANKS = 2


# -- one load, in a process of its own -------------------------------------------------------------


def load_thaw(path: Path) -> Tensors:
    from weights.tensors import load_tensors

    return load_tensors(path)


def load_rank(path: Path) -> Tensors:
    from weights.tensors import load_tensors

    return load_tensors(path, rank=0, ranks=RANKS)


def load_torch(path: Path) -> Tensors:
    return {k: v for f in sorted(path.glob("*.bin")) for k, v in torch.load(f, weights_only=True).items()}


def load_slices(path: Path) -> Tensors:
    """Take a rank's slice of every tensor, as an engine does with a whole checkpoint."""
    from safetensors import safe_open

    found: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a dict
                part = opened.get_slice(name)
                shape = part.get_shape()
                if name.endswith(WHOLE):
                    found[name] = opened.get_tensor(name).clone()
                elif name.endswith(ROWS):
                    found[name] = part[:, : shape[1] // RANKS].clone()
                else:
                    found[name] = part[: shape[0] // RANKS].clone()
    return found


LOADS: dict[str, tuple[str, Callable[[Path], Tensors]]] = {
    "safetensors": ("aligned", load_thaw),
    "safetensors, unaligned": ("unaligned", load_thaw),
    "converted": ("converted", load_thaw),
    ".bin by torch.load": ("pickled", load_torch),
    "rank 0 of 2, converted": ("divided", load_rank),
    "rank 0 of 2, slices of safetensors": ("aligned", load_slices),
}


def one_load(name: str, root: Path) -> dict[str, float]:
    directory, load = LOADS[name]
    cpu, started = time.process_time(), time.perf_counter()
    tensors = load(root / directory)
    total = checksum(tensors.values())
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "bytes": sum(t.numel() * t.itemsize for t in tensors.values()),
        "peak_bytes": _peak_bytes(),
        "checksum": total,
    }


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


# -- the run ---------------------------------------------------------------------------------------


def unalign(source: Path, target: Path) -> None:
    """Rewrite the files with headers that are not padded, as old writers left them.

    The data begins at an odd byte.
    """
    target.mkdir()
    shutil.copy(source / "model.safetensors.index.json", target)
    for file in source.glob("*.safetensors"):
        with file.open("rb") as data, (target / file.name).open("wb") as out:
            length = int.from_bytes(data.read(8), "little")
            header = data.read(length).rstrip(b" ")
            header += b" " * (len(header) % 2 == 0)
            out.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(data, out, 1 << 24)
            os.fsync(out.fileno())


def pickle_of(source: Path, target: Path) -> None:
    from safetensors.torch import load_file

    target.mkdir()
    index = json.loads((source / "model.safetensors.index.json").read_text())
    for file in source.glob("*.safetensors"):
        torch.save(load_file(file), target / file.with_suffix(".bin").name)
    weight_map = {name: file.replace(".safetensors", ".bin") for name, file in index["weight_map"].items()}
    (target / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def drop_from_cache(directory: Path) -> None:
    set_cache([p for p in directory.iterdir() if p.is_file()], warm=False)


def convert(source: Path, target: Path, *arguments: str) -> dict[str, float]:
    drop_from_cache(source)
    command = [sys.executable, "-m", "weights.convert", str(source), str(target), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["report"]
    return report


def conversions(root: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    kinds = {
        "safetensors": ("aligned", "converted", ()),
        "safetensors, --verify": ("aligned", "again", ("--verify",)),
        ".bin": ("pickled", "again", ()),
        "safetensors, --tensor-parallel 2": ("aligned", "divided", ("--tensor-parallel", "2")),
    }
    for _ in range(rounds):
        for name, (source, target, arguments) in kinds.items():
            shutil.rmtree(root / target, ignore_errors=True)
            found[name].append(convert(root / source, root / target, *arguments))
        shutil.rmtree(root / "again")
    return found


def loads(root: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    names = list(LOADS)
    for number in range(rounds):
        random.Random(number).shuffle(names)
        for name in names:
            print(f"round {number + 1}/{rounds}: {name} (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
            drop_from_cache(root / LOADS[name][0])
            command = [sys.executable, "-m", "bench.convert", "--load", name, "--directory", str(root)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    for group in (("safetensors", "safetensors, unaligned", "converted", ".bin by torch.load"), tuple(LOADS)[4:]):
        if len({one["checksum"] for name in group for one in found[name]}) != 1:
            raise RuntimeError(f"{', '.join(group)} read different bytes")
    return found


def show(title: str, samples: dict[str, list[dict[str, float]]], size: str) -> dict[str, float]:
    table = Table("", "GB/s", "seconds", "CPU s", "peak GB", title=f"{title}: median (least to most)")
    figures: dict[str, float] = {}
    for name, rounds in samples.items():
        speeds = [one[size] / one["seconds"] / 1e9 for one in rounds]
        seconds, cpu, peak = (median([one[key] for one in rounds]) for key in ("seconds", "cpu_seconds", "peak_bytes"))
        row = (
            f"{median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})",
            f"{seconds:.2f}",
            f"{cpu:.2f}",
            f"{peak / 1e9:.2f}",
        )
        table.add_row(name, *row)
        key = f"{title}.{name}".replace(", ", ".").replace(" ", "_")
        figures |= {
            f"{key}.gb_per_s": median(speeds),
            f"{key}.seconds": seconds,
            f"{key}.cpu_seconds": cpu,
            f"{key}.peak_gb": peak / 1e9,
        }
    Console(width=120).print(table)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=parse_size, default=parse_size("1GB"), help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; the temporary directory by default")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--load", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(one_load(options.load, options.directory)))
        return
    print(json.dumps(machine()), file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="thaw-convert-", dir=options.directory) as directory:
        root = Path(directory)
        (root / "aligned").mkdir()
        write_checkpoint(root / "aligned", options.bytes)
        unalign(root / "aligned", root / "unaligned")
        pickle_of(root / "aligned", root / "pickled")
        for name in ("aligned", "pickled"):
            (root / name / "config.json").write_text(json.dumps(CONFIG))
        figures = show("convert", conversions(root, options.rounds), "source_bytes")
        figures |= show("load", loads(root, options.rounds), "bytes")
    write(options.json, figures)


if __name__ == "__main__":
    main()
