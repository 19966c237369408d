"""Compare loads into memory that the machine has never used, as just after its boot.

    python -m bench.loader_boot [--bytes 1.2GB] [--rounds N] [--directory DIR]
        [--peers-python PYTHON] [--json PATH]

The host of a virtual machine backs memory at its first touch, which is several times slower than
memory that the machine has used before. A load that follows another one meets the memory that was
freed there. So each round takes every case once, in turn from the first and from the last, and no
memory returns: each process stays until the end, and what the page cache gives up is taken by this
process. It takes memory until the kernel has none left that was touched before, which shows in the
speed. A machine has as many rounds as its memory allows, once after a boot; the run ends with an
error when there is no memory left for the next case.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import peers
from bench.disk import FIO_SETTINGS, Loading, level, run_fio, set_cache, write_checkpoint
from bench.loader_case import MODULES
from bench.report import machine, median, write
from bench.samples import Samples
from thaw.units import parse_size

CASES = {
    "thaw": ("thaw_pool", {}),
    "thaw, memory made ready": ("thaw_pool", {"ready": 1}),
    "safetensors": ("safetensors", {}),
    "runai": ("runai", {}),
    "fastsafetensors": ("fastsafetensors", {}),
}
PIECE = 128 << 20
SPARE = 2 << 30
"""Bytes that stay free for the machine."""


def touch() -> tuple[mmap.mmap, float]:
    """Return a piece of memory, and the bytes per second at which the kernel gave it."""
    started = time.perf_counter()
    piece = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    return piece, PIECE / (time.perf_counter() - started)


def available_bytes() -> int:
    """Return the bytes of memory that are free and hold no page cache."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemFree"].split()[0]) * 1024


class Memory:
    """The memory that was touched before, which this process takes away from the cases."""

    def __init__(self) -> None:
        self._pieces: list[mmap.mmap] = []
        piece, _ = touch()
        piece.close()
        again, self._known = touch()
        self._pieces.append(again)

    def take_touched(self) -> float:
        """Take all memory that was touched before; return bytes/s of the memory beyond it.

        Raises:
            RuntimeError: There is none beyond it.
        """
        fresh: list[float] = []
        while len(fresh) < 3:
            if available_bytes() < SPARE:
                raise RuntimeError("no memory is left that was never touched: run this just after a boot, or with fewer --rounds")
            piece, speed = touch()
            self._pieces.append(piece)
            fresh = [*fresh, speed] if speed < 0.6 * self._known else []
        return median(fresh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=parse_size, default=parse_size("1.2GB"), help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; the temporary directory by default")
    parser.add_argument("--peers-python", default=peers.python() or sys.executable)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    samples, memory = Samples(), Memory()
    print(machine(), file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="thaw-bench-", dir=options.directory) as directory, contextlib.ExitStack() as held:
        files = write_checkpoint(Path(directory), options.bytes)
        total = sum(f.stat().st_size for f in files)
        for number in range(options.rounds):
            order = list(CASES.items())
            for name, (loader, settings) in order if number % 2 == 0 else reversed(order):
                python = options.peers_python if loader in MODULES else sys.executable
                # A pool that is made ready takes its memory, fresh too, before it is timed.
                loading = held.enter_context(Loading(loader, files, dict(settings), python))
                set_cache(files, warm=False)
                level(files)
                speed = memory.take_touched()
                got = loading.go()
                samples.add(f"{name}.gb_per_s", total / got["seconds"] / 1e9)
                samples.add(f"{name}.cpu_seconds", got["cpu_seconds"])
                samples.add("fresh_memory.gb_per_s", speed / 1e9)
                print(f"{name}: {total / got['seconds'] / 1e9:.2f} GB/s", file=sys.stderr)
            if shutil.which("fio"):
                set_cache(files, warm=False)
                level(files)
                samples.add("fio.gb_per_s", max(run_fio(files, *s)[0] for s in FIO_SETTINGS) / 1e9)
    figures = {name: samples.median(name) for name in samples.names()}
    table = Table("", "GB/s", "CPU s", title="Loads into memory that was never touched")
    for name in [*CASES, "fio", "fresh_memory"]:
        if speeds := samples.get_values(f"{name}.gb_per_s"):
            cpu = samples.get_values(f"{name}.cpu_seconds")
            table.add_row(name, " ".join(f"{s:.2f}" for s in speeds), " ".join(f"{s:.1f}" for s in cpu))
    Console(width=100).print(table)
    write(options.json, {name.replace(", ", ".").replace(" ", "_"): value for name, value in figures.items()})


if __name__ == "__main__":
    main()
