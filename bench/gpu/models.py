"""Write the models that the steps of `python -m bench.gpu` serve, with random weights.

    python -m bench.gpu.models DIRECTORY [--tiny] [--json PATH]

- base:  the layers of Llama-3-8B (hidden size 4096, 32 heads, 8 for keys and values), 36 of them
         with a vocabulary of 8192: 15.8 GB in bfloat16
- tuned: as base, but the last layers, at least a fifth of the bytes, are different
- m0 … m9: models of 1.1 GB with different weights

`--tiny` writes models of a few MB with the same names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from bench.report import write
from thaw.demo.models import SIZES, Shape, make_demo_model

BASE, TUNED = "base", "tuned"
TEN = tuple(f"m{number}" for number in range(10))
LARGE = Shape(8192, 4096, 14336, 36, 32, 8, 2048, "bfloat16", 0.0)
SMALL = Shape(8192, 2048, 5632, 11, 32, 4, 2048, "bfloat16", 0.0)
TINY = replace(SIZES["5m"], hidden=256, intermediate=1024, layers=8, heads=4, kv_heads=2, end_gain=0.0)
CHANGED = 0.2
"""Part of the bytes that differs between `base` and `tuned`, at least."""
_WRITERS = 6


def bytes_of(model: Path) -> int:
    """Return the bytes of a model's weights."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def fine_tune(base: Path, tuned: Path, changed: float = CHANGED) -> float:
    """Copy a model, and change the last of its layers.

    The values of a changed tensor are in reverse order, so their distribution stays the same.

    Args:
        base: The model, with one safetensors file.
        tuned: Written; replaced if it exists.
        changed: Least part of the bytes that is changed.

    Returns:
        The part of the bytes that was changed.
    """
    shutil.rmtree(tuned, ignore_errors=True)
    shutil.copytree(base, tuned)
    with (tuned / "model.safetensors").open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        places = {name: entry["data_offsets"] for name, entry in header.items() if name.startswith("model.layers.")}
        total = max(end for name, entry in header.items() if name != "__metadata__" for end in entry["data_offsets"])
        done = 0
        for begin, end in sorted(places.values(), reverse=True):
            if done >= changed * total:
                break
            file.seek(start + begin)
            values = np.frombuffer(file.read(end - begin), np.uint16)
            file.seek(start + begin)
            file.write(values[::-1].tobytes())
            done += end - begin
    return float(done / total)


def write_models(directory: Path, *, tiny: bool) -> dict[str, float]:
    """Write all models that the directory lacks; return figures of it."""
    large, small = (TINY, TINY) if tiny else (LARGE, SMALL)
    wanted = [(directory / name, small, seed) for seed, name in enumerate(TEN, 1)]
    wanted.insert(0, (directory / BASE, large, 0))
    began = time.monotonic()
    missing = [w for w in wanted if not w[0].exists()]
    with ProcessPoolExecutor(min(_WRITERS, os.cpu_count() or 1), get_context("spawn")) as pool:
        for done in [pool.submit(make_demo_model, *w) for w in missing]:
            done.result()
    changed = fine_tune(directory / BASE, directory / TUNED)
    return {
        "base_gb": bytes_of(directory / BASE) / 1e9,
        "one_of_ten_gb": bytes_of(directory / TEN[0]) / 1e9,
        "changed_part": changed,
        "seconds": time.monotonic() - began,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.models", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    write(options.json, write_models(options.directory, tiny=options.tiny))
    return 0


if __name__ == "__main__":
    sys.exit(main())
