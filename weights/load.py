"""Load a checkpoint into shared memory, without a mesh.

The loader service, benchmarks and tests use this module.

    python -m weights.load SOURCE [--threads N] [--ready] [--verify]

times one load and prints it as one line of JSON; a refusal is `{"error": …}` and status 1. SOURCE
is a directory, a file, or the URL of a model (https://, s3://, gs://, az://, hf://), which is then
read straight into memory and not kept on the disk.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import InvalidModel, ThawError
from weights.formats.checkpoint import Checkpoint, open_checkpoint, open_path
from weights.formats.root import expand_user
from weights.formats.segment import Layout, lay_out
from weights.formats.verify import check_hashed
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory
from weights.pool.region import Region
from weights.pool.shm import free_bytes, no_room
from weights.sources.open import is_remote, open_source
from weights.tiers.headers import bring_small_files, checkpoint_of
from weights.tiers.port import Tier
from weights.transfer.fill import Filling, PieceReader
from weights.transfer.link import Link
from weights.transfer.pieces import cut
from weights.transfer.reader import DEFAULTS, FilesReader, ReadOptions, ReadStats
from weights.transfer.remote import TierReader
from weights.transfer.verification import verify_region


@dataclass(frozen=True)
class LoadReport:
    """Duration of one load.

    Attributes:
        seconds: From the start of the call to the last byte.
        read_seconds: The part of `seconds` spent on the weight files.
    """

    segment: str
    total_bytes: int
    seconds: float
    read_seconds: float
    stats: ReadStats
    verified_bytes: int = 0
    verify_seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.total_bytes / max(self.read_seconds, 1e-9)


def load_segment(
    directory: Path | str,
    name: str,
    options: ReadOptions = DEFAULTS,
    *,
    weights_id: str = "",
    cancelled: threading.Event | None = None,
    on_layout: Callable[[Layout], None] | None = None,
    on_index: Callable[[Layout], None] | None = None,
    on_loaded: Callable[[int], None] | None = None,
) -> LoadReport:
    """Load the checkpoint in `directory` into a new file /dev/shm/`name`.

    The caller unlinks the file. On an error the function removes everything.

    Args:
        on_layout: Called before any memory is taken; it may raise to refuse the load.
        on_index: Called when readers may map the segment.
        on_loaded: Called from the reading threads with the watermark in bytes.

    Raises:
        CheckpointInvalid: A file is missing or invalid.
        InsufficientMemory: The memory does not suffice.
        Cancelled: The load was cancelled.
    """
    started = time.monotonic()
    layout = lay_out(open_checkpoint(Path(directory)), weights_id or name)
    if on_layout is not None:
        on_layout(layout)
    pool = _own_pool(name, layout.total_bytes)
    complete = False
    try:
        region = _cover_pool(pool, layout.total_bytes)
        pieces = cut(layout, options.chunk_bytes)
        filling = Filling(layout, region, pieces, cancelled=cancelled, on_loaded=on_loaded)
        filling.write_head()
        if on_index is not None:
            on_index(layout)
        reading = time.monotonic()
        stats = read_all(filling, FilesReader(layout.places, pieces, region, options), options.threads)
        complete = True
    finally:
        pool.close(unlink=not complete)
    ended = time.monotonic()
    return LoadReport(name, layout.total_bytes, ended - started, ended - reading, stats)


def _own_pool(name: str | None, total_bytes: int) -> PoolMemory:
    """Memory for one load only. Raises `InsufficientMemory`."""
    if total_bytes > free_bytes():
        raise no_room(total_bytes)
    return PoolMemory(name, total_bytes)


def _cover_pool(pool: PoolMemory, total_bytes: int) -> Region:
    return Region(pool, range(-(-total_bytes // CHUNK_BYTES)), total_bytes)


def read_all(filling: Filling, reader: PieceReader, threads: int) -> ReadStats:
    """Read all pieces over a link of their own. Raises the errors of `Filling.run`."""
    link = Link("read", threads)
    try:
        filling.run(reader, link)
    finally:
        link.close()
    return reader.stats


@dataclass(frozen=True)
class PrivateLoad:
    """A checkpoint in memory of this process alone; the memory is freed with `memory`."""

    layout: Layout
    memory: mmap.mmap
    report: LoadReport


@contextmanager
def opened(path: Path | str, rank: int, ranks: int) -> Iterator[tuple[Checkpoint, Tier | None]]:
    """Open the headers of the checkpoint at `path`.

    A tier is included if the files are not on this host.
    """
    if not is_remote(str(path)):
        if "://" in str(path):
            raise InvalidModel(
                f"{path}: no place of that kind is known; https://, s3://, gs://, az:// and hf:// are, and directories"
            )
        yield open_path(expand_user(path), rank, ranks), None
        return
    with ExitStack() as leaving:
        tier = open_source(str(path))
        leaving.callback(tier.close)
        if tier.directory is not None:
            yield open_path(tier.directory, rank, ranks), None
            return
        small = Path(leaving.enter_context(tempfile.TemporaryDirectory(prefix="thaw-load-")))
        bring_small_files(tier, small, trust_remote_code=False)
        yield checkpoint_of(tier, small, rank, ranks), tier


def load_private(
    path: Path | str,
    options: ReadOptions = DEFAULTS,
    *,
    rank: int = 0,
    ranks: int = 1,
    check: Callable[[Checkpoint], None] | None = None,
    pool: PoolMemory | None = None,
    verify: bool = False,
) -> PrivateLoad:
    """Load a model into memory without a name.

    The model is a directory, a safetensors file or a URL. On an error no memory is kept.

    Args:
        rank: The part to load of a model divided by `thaw convert`.
        check: Called before memory is taken; it may raise to refuse the load.
        pool: Memory to use, closed on an error; by default a new pool.
        verify: Compare the loaded bytes with the hashes of a converted checkpoint; other layouts
            are refused.

    Raises:
        CheckpointInvalid: A file is missing or invalid.
        InsufficientMemory: The memory does not suffice.
        Unavailable: The source cannot be read.
    """
    started = time.monotonic()
    try:
        with opened(path, rank, ranks) as (checkpoint, tier):
            if check is not None:
                check(checkpoint)
            if verify:
                check_hashed(checkpoint, str(path))
            layout = lay_out(checkpoint, "")
            pool = pool or _own_pool(None, layout.total_bytes)
            reading = time.monotonic()
            region = _cover_pool(pool, layout.total_bytes)
            pieces = cut(layout, options.chunk_bytes, remote=tier is not None)
            reader: PieceReader = FilesReader(layout.places, pieces, region, options)
            if tier is not None:
                reader = TierReader(tier, layout.places, region)
            stats = read_all(Filling(layout, region, pieces), reader, options.threads)
            if tier is not None:
                tier.finish()
            read = time.monotonic()
            verified = verify_region(layout, region, source=tier.source if tier else None) if verify else 0
            ended = time.monotonic()
    except BaseException:
        if pool is not None:
            pool.close()
        raise
    report = LoadReport("", layout.total_bytes, ended - started, read - reading, stats, verified, ended - read)
    return PrivateLoad(layout, pool.detach(), report)


def ready_pool(path: Path | str, *, rank: int = 0, ranks: int = 1) -> PoolMemory:
    """Memory for one load of `path`, populated beforehand, as a loader's pool has it.

    Raises what `load_private` raises.
    """
    with opened(path, rank, ranks) as (checkpoint, _):
        total = lay_out(checkpoint, "").total_bytes
    pool = _own_pool(None, total)
    try:
        whole, rest = divmod(total, CHUNK_BYTES)
        for chunk in range(whole):
            pool.prepare_huge(chunk)
        if rest:
            pool.populate(whole * CHUNK_BYTES, rest)
    except BaseException:
        pool.close()
        raise
    return pool


def measure(path: Path | str, threads: int, *, ready: bool = False, verify: bool = False) -> dict[str, Any]:
    """Measure one load: bytes, seconds, CPU seconds, bandwidths in GB/s (10^9 bytes).

    Seconds are wall time. The memory is freed after the load. `stages` follow each other; `steps`
    are the seconds of the reading threads' steps, summed over all threads.

    Args:
        ready: Populate the memory before the clock runs.
        verify: Compare hashes, and report the time as a stage.
    """
    pool = ready_pool(path) if ready else None
    before = time.process_time()
    loaded = load_private(path, ReadOptions(threads=threads), pool=pool, verify=verify)
    cpu = time.process_time() - before
    report, stats = loaded.report, loaded.report.stats
    count = sum(place.file.size for place in loaded.layout.places)
    loaded.memory.close()
    return {
        "path": str(path),
        "tier": "dram",
        "files": len(loaded.layout.places),
        "bytes": count,
        "seconds": round(report.seconds, 6),
        "gb_per_s": _gb_per_s(count, report.seconds),
        "cpu_seconds": round(cpu, 6),
        "threads": threads,
        "stages": [
            {"stage": "headers", "seconds": round(report.seconds - report.read_seconds - report.verify_seconds, 6)},
            {"stage": "read", "seconds": round(report.read_seconds, 6), "gb_per_s": _gb_per_s(count, report.read_seconds)},
            *([_verify_stage(report)] if verify else []),
        ],
        "verified_bytes": report.verified_bytes,
        "steps": [
            _step("page cache", stats.copy_seconds, stats.cached),
            _step("allocate", stats.allocate_seconds, stats.direct + stats.buffered),
            _step("disk", stats.disk_seconds, stats.direct + stats.buffered),
            _step("remote", stats.remote_seconds, stats.remote),
        ],
        "direct_bytes": stats.direct,
        "cached_bytes": stats.cached,
        "buffered_bytes": stats.buffered,
        "remote_bytes": stats.remote,
    }


def _verify_stage(report: LoadReport) -> dict[str, Any]:
    speed = _gb_per_s(report.verified_bytes, report.verify_seconds)
    return {"stage": "verify", "seconds": round(report.verify_seconds, 6), "gb_per_s": speed}


def _step(name: str, seconds: float, count: int) -> dict[str, Any]:
    return {"step": name, "thread_seconds": round(seconds, 6), "bytes": count, "gb_per_s": _gb_per_s(count, seconds)}


def _gb_per_s(count: int, seconds: float) -> float | None:
    return round(count / seconds / 1e9, 3) if count and seconds > 0 else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m weights.load", description="Time one load into memory.")
    parser.add_argument("path", metavar="SOURCE")
    parser.add_argument("--threads", type=int, default=4, choices=range(1, 65), metavar="N")
    parser.add_argument("--ready", action="store_true", help="populate the memory before the clock runs")
    parser.add_argument("--verify", action="store_true", help="compare with the hashes of a converted checkpoint")
    options = parser.parse_args(arguments)
    try:
        document = measure(options.path, options.threads, ready=options.ready, verify=options.verify)
        status = os.EX_OK
    except ThawError as e:
        document, status = {"error": e.body().model_dump()}, 1
    sys.stdout.write(json.dumps(document) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
