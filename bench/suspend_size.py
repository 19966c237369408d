"""Measure suspension by page-out, by size, beside the disk's own bandwidth.

This is a part of `bench.hot_swap`. The nodeagent's own adapter suspends and resumes a process of
each size: all its pages written for the first time, then read again only, then all written again.
Its bytes cannot be compressed, so that zram gains nothing. In between fio writes as many bytes to
the disk that has the swap.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.nodeagent.suspend import memory
from services.nodeagent.suspend.cgroups import Cgroups, open_cgroups
from services.nodeagent.suspend.cpu import PageOut
from services.nodeagent.suspend.port import Target

GIB = 1 << 30
SIZES = (0.5, 1.0, 2.0, 3.0)
"""GiB."""
MOST_ROUNDS = 3
JOBS = (1, 2, 4)
_ROOM = 1.1
BALLAST = """
import mmap, os, sys, time
size, step = int(sys.argv[1]), 16 << 20
held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
noise = os.urandom(step)
for at in range(0, size, step):
    held[at : at + step] = noise[: min(step, size - at)]
for at in range(0, size, 4096):
    held[at : at + 8] = at.to_bytes(8, "little")
print("ready", flush=True)
for line in sys.stdin:
    begun, seen = time.perf_counter(), 0
    for at in range(8, size, 4096):
        seen ^= held[at]
        if line == "write\\n":
            held[at] ^= 1
    print(time.perf_counter() - begun, flush=True)
"""
Add = Callable[[str, float], None]


@dataclass
class Ballast:
    """A process that holds so many bytes."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, size: int) -> Self:
        command = [sys.executable, "-c", BALLAST, str(size)]
        made = cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        made.line()
        return made

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def touch(self, how: str) -> float:
        """Seconds to "read" or to "write" each of its pages."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{how}\n")
        self.process.stdin.flush()
        return float(self.line())


def sizes(add: Add, rounds: int) -> None:
    """Suspend and resume processes of each size.

    Args:
        add: Called with each figure.
        rounds: Number of rounds, at most `MOST_ROUNDS`.
    """
    groups = open_cgroups(f"b{uuid.uuid4().hex[:6]}")
    way = PageOut(groups)
    if why := way.explain_unavailable():
        print(f"sizes are left out: {why}", file=sys.stderr)
        return
    for _ in range(min(rounds, MOST_ROUNDS)):
        for size in SIZES:
            if memory.swap_space().free < size * GIB * _ROOM:
                print(f"{size:g} GiB are left out: they do not fit the swap that is free", file=sys.stderr)
                continue
            asyncio.run(_there_and_back(way, groups, size, add))
        for jobs in JOBS:
            if (speed := disk_writes(int(SIZES[-1] * GIB), jobs)) is not None:
                add(f"disk_{jobs}_writers_mib_per_s", speed / (1 << 20))


async def _there_and_back(way: PageOut, groups: Cgroups, size: float, add: Add) -> None:
    ballast = await asyncio.to_thread(Ballast.start, int(size * GIB))
    try:
        target = Target("i", "ballast", ("cpu:0",), groups.gather("i", ballast.process.pid, include_host=True))
        for order, touched in (("first", "read"), ("read_again", "write"), ("written_again", "read")):
            await asyncio.to_thread(os.sync)
            begun = time.perf_counter()
            taken = await way.suspend(target)
            took = time.perf_counter() - begun
            add(f"{size:g}_gib_suspend_{order}_ms", took * 1e3)
            add(f"{size:g}_gib_freed_part", taken.freed_bytes / taken.used_bytes)
            begun = time.perf_counter()
            await way.resume(target)
            await asyncio.to_thread(ballast.touch, touched)
            add(f"{size:g}_gib_resume_all_touched_ms", (time.perf_counter() - begun) * 1e3)
            await way.wait_for_prefetches()
    finally:
        groups.kill("i")
        ballast.process.communicate()
        way.forget("i")
        groups.remove("i")


def disk_writes(nbytes: int, jobs: int) -> float | None:
    """Return bytes per second that fio writes in order beside the swap file.

    It writes past the page cache. None without fio or the room.
    """
    place = _beside_swap()
    if shutil.which("fio") is None or shutil.disk_usage(place).free < 2 * nbytes:
        print("what the disk writes is left out: there is no fio, or no room", file=sys.stderr)
        return None
    each = nbytes // jobs >> 20
    with tempfile.TemporaryDirectory(dir=place, prefix="thaw-bench-") as directory:
        command = ["fio", "--name=limit", f"--directory={directory}", f"--size={each}m", f"--numjobs={jobs}", "--rw=write"]
        command += ["--bs=1m", "--direct=1", "--ioengine=libaio", "--iodepth=8", "--group_reporting", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["write"]["bw_bytes"])


def _beside_swap() -> str:
    """Return the directory of the first swap file.

    It is the directory of temporary files where swap is no file.
    """
    for line in Path("/proc/swaps").read_text().splitlines()[1:]:
        name, kind, *_ = line.split()
        if kind == "file" and os.access(Path(name).parent, os.W_OK):
            return str(Path(name).parent)
    return tempfile.gettempdir()


def beside_the_disk(of: Callable[[str], list[float]], median: Callable[[list[float]], float]) -> dict[str, float]:
    """Return the bandwidth of first suspensions relative to the disk's, by size.

    The disk's bandwidth is that of its best number of writers.
    """
    limits = [median(values) for jobs in JOBS if (values := of(f"disk_{jobs}_writers_mib_per_s"))]
    found = {}
    for size in SIZES:
        if limits and (took := of(f"{size:g}_gib_suspend_first_ms")):
            found[f"{size:g}_gib_first_over_disk"] = size * 1024 / (median(took) / 1e3) / max(limits)
    return found
