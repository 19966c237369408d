"""One load in a process of its own: `python -m bench.loader_case CASE`, CASE as JSON; prints one line of JSON.

Each ends with tensors in memory of its own. Those that map the file (safetensors, torch.load with mmap) copy each tensor out of the mapping.
The clock runs from before the first byte until a checksum over three pages of every tensor is known; imports are done before. Then every
page is touched once, so that the peak resident memory counts them all.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
_PAGE = 4096


def thaw_segment(files: list[Path], options: dict[str, Any]) -> tuple[Tensors, Callable[[], None]]:
    """What the mesh does: a named segment, mapped by the engine."""
    from services.engine.segment import Segment
    from services.loader.adapters.reader import ReadOptions
    from services.loader.adapters.shm import SHM
    from services.loader.load import load_segment

    name = f"thaw-bench-{os.getpid()}"

    def load() -> Tensors:
        try:
            load_segment(files[0].parent, name, ReadOptions(**options))
            return Segment(name).tensors()
        finally:
            (SHM / name).unlink(missing_ok=True)

    return _run(load)


def thaw_tensors(files: list[Path], options: dict[str, Any]) -> tuple[Tensors, Callable[[], None]]:
    from services.loader.adapters.reader import ReadOptions
    from services.loader.tensors import load_tensors

    return _run(lambda: load_tensors(files[0].parent, ReadOptions(**options)))


def safetensors(files: list[Path], _: dict[str, Any]) -> tuple[Tensors, Callable[[], None]]:
    from safetensors.torch import load_file

    return _run(lambda: {k: v.clone() for f in files for k, v in load_file(f).items()})


def torch_load(files: list[Path], _: dict[str, Any]) -> tuple[Tensors, Callable[[], None]]:
    return _run(lambda: {k: v for f in files for k, v in torch.load(f, weights_only=True).items()})


def torch_load_mmap(files: list[Path], _: dict[str, Any]) -> tuple[Tensors, Callable[[], None]]:
    return _run(lambda: {k: v.clone() for f in files for k, v in torch.load(f, weights_only=True, mmap=True).items()})


def fastsafetensors(files: list[Path], _: dict[str, Any]) -> tuple[Tensors, Callable[[], None]]:
    module = importlib.import_module("fastsafetensors")
    kept: list[Any] = []

    def load() -> Tensors:
        loader = module.SafeTensorsFileLoader(module.SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: [str(f) for f in files]})
        buffer = loader.copy_files_to_device()
        kept.extend((loader, buffer))  # the tensors are views of its buffers
        return {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}

    def close() -> None:
        kept[1].close()
        kept[0].close()

    tensors, _nothing = _run(load)
    return tensors, close


def runai(files: list[Path], _: dict[str, Any]) -> tuple[Tensors, Callable[[], None]]:
    module = importlib.import_module("runai_model_streamer")

    def load() -> Tensors:
        with module.SafetensorsStreamer() as streamer:
            streamer.stream_files([str(f) for f in files])
            return dict(streamer.get_tensors())

    return _run(load)


def save_as_torch(files: list[Path], _: dict[str, Any]) -> tuple[Tensors, Callable[[], None]]:
    """Write a .bin beside each file."""
    from safetensors.torch import load_file

    for file in files:
        torch.save(load_file(file), file.with_suffix(".bin"))
    return {}, lambda: None


LOADERS = {
    f.__name__: f
    for f in (thaw_segment, thaw_tensors, safetensors, torch_load, torch_load_mmap, fastsafetensors, runai, save_as_torch)
}
MODULES = {"fastsafetensors": "fastsafetensors", "runai": "runai_model_streamer"}
figures: dict[str, float] = {}


def _cpu_seconds() -> float:
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in both)


def _run(load: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
    resident, cpu, started = _resident_bytes(), _cpu_seconds(), time.perf_counter()
    tensors = load()
    figures["checksum"] = checksum(tensors.values())
    figures["seconds"] = time.perf_counter() - started
    figures["cpu_seconds"] = _cpu_seconds() - cpu
    figures["resident_before"] = resident
    return tensors, lambda: None


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Over the first, the middle and the last page of every tensor."""
    total = 0
    for tensor in tensors:
        raw = tensor.reshape(-1).view(torch.uint8)
        middle = len(raw) // 2
        for part in (raw[:_PAGE], raw[middle : middle + _PAGE], raw[-_PAGE:]):
            total += int(part.sum(dtype=torch.int64))
    return total


def main() -> None:
    case = json.loads(sys.argv[1])
    name = case["loader"]
    if name in MODULES:
        importlib.import_module(MODULES[name])
    if case.get("probe"):
        return
    tensors, close = LOADERS[name]([Path(f) for f in case["files"]], case.get("options", {}))
    for tensor in tensors.values():
        tensor.reshape(-1).view(torch.uint8)[::_PAGE].sum()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures["peak_bytes"] = peak - figures.pop("resident_before", 0)
    print(json.dumps(figures), flush=True)
    tensors.clear()
    close()


if __name__ == "__main__":
    main()
