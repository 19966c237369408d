"""HTTP clients reading 16 MiB ranges of one file into memory that is there, four at once, from
nginx on the same machine.

    python -m bench.range_clients [--bytes 2GB] [--rounds N] [--directory DIR] [--json PATH]

All by turns, in each round. `curl` (four processes, to /dev/null) is the plain parallel download to
compare with. CPU seconds are the client's.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import mmap
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import obstore
import urllib3
from obstore.store import HTTPStore

from bench.loader_service import web_server
from bench.report import machine, median, write
from weights.tiers.http_client import HttpClient
from weights.tiers.ranges import RangeReader, RemoteFile

RANGE_BYTES = 16 * 1024 * 1024
CONNECTIONS = 4
Read = Callable[[int, memoryview], None]


def make_range_header(offset: int, into: memoryview) -> dict[str, str]:
    return {"Range": f"bytes={offset}-{offset + len(into) - 1}"}


def thaw(url: str) -> Read:
    reader, file = RangeReader(HttpClient()), RemoteFile(lambda: url, url)
    return lambda offset, into: reader.read(file, offset, into)


def read_by_http_client(url: str) -> Read:
    """http.client's own readinto."""
    parts, local = urlsplit(url), threading.local()

    def read(offset: int, into: memoryview) -> None:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(parts.netloc)
        local.connection.request("GET", parts.path, headers=make_range_header(offset, into))
        response, done = local.connection.getresponse(), 0
        while done < len(into):
            done += response.readinto(into[done:])

    return read


def read_by_urllib3(url: str) -> Read:
    """urllib3."""
    pool = urllib3.PoolManager(maxsize=CONNECTIONS)

    def read(offset: int, into: memoryview) -> None:
        response, done = pool.request("GET", url, headers=make_range_header(offset, into), preload_content=False), 0
        while done < len(into):
            done += response.readinto(into[done : done + (1 << 20)])
        response.release_conn()

    return read


def read_by_httpx(url: str) -> Read:
    """httpx."""
    client = httpx.Client()

    def read(offset: int, into: memoryview) -> None:
        done = 0
        with client.stream("GET", url, headers=make_range_header(offset, into)) as response:
            for data in response.iter_raw():
                into[done : done + len(data)] = data
                done += len(data)

    return read


def rust(url: str) -> Read:
    """obstore, as a stream of pieces."""
    base, name = url.rsplit("/", 1)
    store = HTTPStore.from_url(base, client_options={"allow_http": True})

    def read(offset: int, into: memoryview) -> None:
        done = 0
        for piece in obstore.get(store, name, options={"range": (offset, offset + len(into))}).stream(min_chunk_size=1 << 20):
            data = memoryview(piece)
            into[done : done + len(data)] = data
            done += len(data)

    return read


CLIENTS: dict[str, Callable[[str], Read]] = {
    "thaw": thaw,
    "http.client": read_by_http_client,
    "urllib3": read_by_urllib3,
    "httpx": read_by_httpx,
    "obstore": rust,
}


def time_reads(read: Read, memory: memoryview) -> tuple[float, float]:
    """GB/s, and CPU seconds per GB."""
    offsets, lock = iter(range(0, len(memory), RANGE_BYTES)), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            read(offset, memory[offset : offset + RANGE_BYTES])

    cpu, began = time.process_time(), time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return len(memory) / seconds / 1e9, cpu / (len(memory) / 1e9)


def curl(url: str, size: int) -> float:
    cuts = [size * i // CONNECTIONS for i in range(CONNECTIONS + 1)]
    began = time.perf_counter()
    running = [
        subprocess.Popen(["curl", "-s", "-o", "/dev/null", "-r", f"{start}-{end - 1}", url])
        for start, end in itertools.pairwise(cuts)
    ]
    for process in running:
        if process.wait() != 0:
            raise RuntimeError(f"curl ended with {process.returncode}")
    return size / (time.perf_counter() - began) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=2e9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    size = int(options.bytes)
    speeds: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, (Path(directory) / "weights").open("wb") as file:
        for _ in range(0, size, RANGE_BYTES):
            file.write(os.urandom(min(RANGE_BYTES, size - file.tell())))
        file.flush()
        memory = memoryview(mmap.mmap(-1, size))
        memory[::4096] = bytes(len(memory[::4096]))
        with web_server(Path(directory)) as base:
            url = f"{base}/weights"
            curl(url, size)
            for _ in range(options.rounds):
                speeds.setdefault("curl", []).append(curl(url, size))
                for name, client in CLIENTS.items():
                    speed, cost = time_reads(client(url), memory)
                    speeds.setdefault(name, []).append(speed)
                    costs.setdefault(name, []).append(cost)
    print(machine(), f"load {os.getloadavg()[0]:.1f}")
    figures: dict[str, float] = {}
    for name, values in speeds.items():
        ratio = median(values) / median(speeds["curl"])
        cpu = f"{median(costs[name]):.2f} CPU s/GB" if name in costs else ""
        print(f"{name:12} {median(values):.2f} GB/s (best {max(values):.2f})  {ratio:.2f} of curl  {cpu}")
        figures |= {f"{name}.gb_per_s": median(values), f"{name}.over_curl": ratio}
        if name in costs:
            figures[f"{name}.cpu_seconds_per_gb"] = median(costs[name])
    write(options.json, figures)


if __name__ == "__main__":
    main()
