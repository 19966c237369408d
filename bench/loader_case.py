"""Run one load in a process: `python -m bench.loader_case CASE`, CASE as JSON.

The process prints one line of JSON. Each load ends with tensors in memory of its own. Loaders that
map the file (safetensors, torch.load with mmap) copy each tensor out of the mapping. After imports
and preparations the process prints "ready", and waits for a line. Then the clock runs from before
the first byte until a checksum over three pages of every tensor is known; CPU seconds include the
loader's background threads. Then every page is touched once, so that the peak resident memory
counts them all. The process ends with its standard input.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
_PAGE = 4096


def thaw_pool(files: list[Path], options: dict[str, Any]) -> tuple[Tensors, Callable[[], None]]:
    """Load as the mesh does.

    A link's threads fill chunks of a pool, which the engine maps as one range.

    Args:
        options: With `ready` the chunks have memory before the clock runs, as in a pool that has
            been used. With `small_pages` they are wherever memory happened to be free.
    """
    from services.engine.model.segment import Segment
    from weights.formats.checkpoint import open_checkpoint
    from weights.formats.segment import lay_out
    from weights.pool.chunks import CHUNK_BYTES, parts
    from weights.pool.memory import PoolMemory
    from weights.pool.region import Region
    from weights.pool.shm import SHM
    from weights.transfer.fill import Filling
    from weights.transfer.link import Link
    from weights.transfer.pieces import cut
    from weights.transfer.reader import FilesReader, ReadOptions

    ready = options.pop("ready", 0)
    small = options.pop("small_pages", 0)
    name = f"thaw-bench-{os.getpid()}"
    count = len(parts(lay_out(open_checkpoint(files[0].parent), "").total_bytes))
    pool = PoolMemory(name, count * CHUNK_BYTES)
    for chunk in range(count) if ready else ():
        pool.populate(chunk * CHUNK_BYTES, CHUNK_BYTES) if small else pool.prepare_huge(chunk)
    chosen = ReadOptions(**options)
    regions: list[Region] = []

    def load() -> Tensors:
        try:
            layout = lay_out(open_checkpoint(files[0].parent), "bench")
            regions.append(region := Region(pool, range(count), layout.total_bytes))
            pieces, arriving = cut(layout, chosen.chunk_bytes), threading.Event()
            filling = Filling(layout, region, pieces, on_loaded=lambda _: arriving.set())
            link = Link("bench", chosen.threads)
            filling.write_head()
            with ThreadPoolExecutor(1) as loader:
                filled = loader.submit(filling.run, FilesReader(layout.places, pieces, region, chosen), link)
                filled.add_done_callback(lambda _: arriving.set())
                arriving.wait()  # the engine is a process of its own: here it would keep the reading threads from beginning
                tensors = Segment(name, region.extents).tensors()  # bound while their bytes arrive
                filled.result()
            link.close()
            return tensors
        finally:
            (SHM / name).unlink(missing_ok=True)

    def zap_regions() -> None:
        for region in regions:
            region.zap_all()

    return _run(load, zap_regions)


def thaw_tensors(files: list[Path], options: dict[str, Any]) -> tuple[Tensors, Callable[[], None]]:
    from weights.load import ready_pool
    from weights.tensors import load_tensors
    from weights.transfer.reader import ReadOptions

    pool = ready_pool(files[0].parent) if options.pop("ready", 0) else None
    return _run(lambda: load_tensors(files[0].parent, ReadOptions(**options), pool=pool))


def whole_files(files: list[Path], _: dict[str, Any]) -> tuple[Tensors, Callable[[], None]]:
    """Load each tensor by itself, buffered, by one thread, into memory of its own.

    The ablation begins with this case.
    """
    import json as parser

    def load() -> Tensors:
        found = {}
        for file in files:
            with file.open("rb", buffering=0) as source:
                size = int.from_bytes(source.read(8), "little")
                header = parser.loads(source.read(size))
                for name, entry in header.items():
                    low, high = entry["data_offsets"]
                    memory = torch.empty(high - low, dtype=torch.uint8)
                    source.seek(8 + size + low)
                    view = memoryview(memory.numpy().data)
                    done = 0
                    while done < len(view):
                        done += source.readinto(view[done:]) or 0
                    found[name] = memory.view(torch.bfloat16).view(entry["shape"])
        return found

    return _run(load)


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
    for f in (thaw_pool, thaw_tensors, whole_files, safetensors, torch_load, torch_load_mmap, fastsafetensors, runai, save_as_torch)
}
MODULES = {"fastsafetensors": "fastsafetensors", "runai": "runai_model_streamer"}
figures: dict[str, float] = {}


def _cpu_seconds() -> float:
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in both)


def _run(load: Callable[[], Tensors], behind: Callable[[], None] = lambda: None) -> tuple[Tensors, Callable[[], None]]:
    print("ready", flush=True)
    sys.stdin.readline()
    cpu, started = _cpu_seconds(), time.perf_counter()
    tensors = load()
    figures["checksum"] = checksum(tensors.values())
    figures["seconds"] = time.perf_counter() - started
    behind()
    figures["cpu_seconds"] = _cpu_seconds() - cpu
    return tensors, lambda: None


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the first, the middle and the last page of every tensor, in any order.

    The tensors have multiples of eight bytes. The pages are summed at once, because summing each by
    itself cost some one percent of a load.
    """
    pages: list[torch.Tensor] = []
    for tensor in tensors:
        raw = tensor.reshape(-1).view(torch.uint8)
        middle = len(raw) // 2
        pages += (raw[:_PAGE], raw[middle : middle + _PAGE], raw[-_PAGE:])
    return int(torch.cat(pages).view(torch.int64).sum())


def main() -> None:
    case = json.loads(sys.argv[1])
    name = case["loader"]
    if name in MODULES:
        importlib.import_module(MODULES[name])
    if case.get("probe"):
        return
    figures["resident_before"] = _resident_bytes()
    tensors, close = LOADERS[name]([Path(f) for f in case["files"]], case.get("options", {}))
    for tensor in tensors.values():
        tensor.reshape(-1).view(torch.uint8)[::_PAGE].sum()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures["peak_bytes"] = peak - figures.pop("resident_before", 0)
    print(json.dumps(figures), flush=True)
    sys.stdin.readline()
    tensors.clear()
    close()


if __name__ == "__main__":
    main()
