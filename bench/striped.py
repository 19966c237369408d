"""Load one model from three paced peers at once, and from one of them.

    python -m bench.striped [--bytes 400MB] [--rate 60MB] [--rounds N] [--json PATH]

Each peer is a process with the loader's own peer server, whose sending is paced for the host, not
for each connection. `slow`: one of the three has a tenth of the rate. `dies`: one is killed in the
middle of the load. The cases take turns in each round, beside three curls that download a third
each from the same peers (fixed shares). The load runs in this process: it verifies SHA-256, and
keeps nothing on the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from bench.loader_service import web_server
from bench.report import machine, median, write
from services.loader.adapters.cards import card_for
from services.loader.adapters.peer_server import PeerServer
from services.loader.adapters.progress import Progress
from services.loader.adapters.run import Run, RunContext, Threads
from services.loader.domain.effects import StartRun
from services.loader.domain.events import Event, LaidOut
from shared.contracts.loader import CachedModel, LoaderStatus
from shared.contracts.model_info import ModelInfo
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.cache.journal import FileHead
from weights.cache.store import EntryRecord, SsdCache
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory
from weights.sources.peers import Peers
from weights.sources.sources import Sources
from weights.transfer.links import Links

_STEP_BYTES = 64 * 1024
_PEERS = 3


class Pace:
    """Bytes per second of all connections of a process."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._lock, self._free_at = bytes_per_second, threading.Lock(), 0.0

    def wait(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic() - 0.01) + nbytes / self._rate
            pause_s = self._free_at - time.monotonic()
        if pause_s > 0:
            time.sleep(pause_s)


def serve(directory: Path, record: EntryRecord, bytes_per_second: float) -> None:
    """Run a peer until its standard input ends."""
    pace = Pace(bytes_per_second)

    def sendfile(connection: socket.socket, file: IO[bytes], offset: int, count: int) -> int:
        done = 0
        while done < count:
            step = min(_STEP_BYTES, count - done)
            pace.wait(step)
            done += os.sendfile(connection.fileno(), file.fileno(), offset + done, step)
        return done

    @contextmanager
    def find(revision: str) -> Iterator[tuple[Path, EntryRecord] | None]:
        yield (directory, record) if revision == record.revision else None

    socket.socket.sendfile = sendfile  # type: ignore[method-assign,assignment]  # the server's own, paced
    server = PeerServer("127.0.0.1", 0, find)
    print(server.url, server.token, flush=True)
    sys.stdin.read()
    server.close()


class Peer:
    """A peer's process."""

    def __init__(self, name: str, directory: Path, record: EntryRecord, bytes_per_second: float) -> None:
        command = [sys.executable, "-m", "bench.striped", "--serve", str(directory), "--rate", str(bytes_per_second)]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(record.model_dump_json() + "\n")
        self.process.stdin.flush()
        self.url, self.token = self.process.stdout.readline().split()

    def status(self, revision: str) -> LoaderStatus:
        cached = (CachedModel(weights_id=revision, tier="ssd", nbytes=1),)
        return LoaderStatus(node=self.name, boot_id="bench", cached=cached, peer_url=self.url, peer_token=self.token)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


def load(info: ModelInfo, peers: list[Peer], home: Path, dies: Peer | None = None) -> float:
    """Return the seconds of one load.

    Args:
        info: The model.
        peers: The nodes that have it.
        home: Directory of the loading node.
        dies: The peer that is killed when a third of the bytes is loaded.
    """
    known = Peers("bench")
    for peer in peers:
        asyncio.run(known.on_status(peer.status(info.revision)))
    count = -(-info.weights_bytes // CHUNK_BYTES)
    pool, links = PoolMemory(None, count * CHUNK_BYTES), Links("fair")
    sources = Sources(SsdCache(home / "cache", 0), (home / "small",), known)

    def emit(event: Event) -> None:
        if isinstance(event, LaidOut):
            run.grant(tuple(range(count)))

    progress = Progress(emit)
    context = RunContext(pool, sources, emit, Threads(), links, progress)
    run = Run(StartRun(info.revision, 1, card_for(info.source, info.revision, info.weights_bytes)), context)

    def kill() -> None:
        assert dies is not None
        while sum(s.moved_bytes for s in links.statuses()) < info.weights_bytes / 3:
            time.sleep(0.005)
        dies.process.kill()

    killer = threading.Thread(target=kill, daemon=True)
    if dies is not None:
        killer.start()
    began = time.perf_counter()
    try:
        run.load()
        return time.perf_counter() - began
    finally:
        run.close()
        progress.close()
        links.close()
        run.filling = run.region = None
        pool.close()


def curl(info: ModelInfo, record: EntryRecord, peers: list[Peer]) -> float:
    """Seconds of downloading a fixed share of the largest file's bytes from each peer.

    The time is scaled to the bytes of the model.
    """
    file = max(record.files, key=lambda f: f.size)
    cuts = [file.size * i // len(peers) for i in range(len(peers) + 1)]
    began = time.perf_counter()
    running = []
    for i, peer in enumerate(peers):
        header, url = f"Authorization: Bearer {peer.token}", f"{peer.url}/models/{info.revision}/{file.name}"
        share = f"{cuts[i]}-{cuts[i + 1] - 1}"
        running.append(subprocess.Popen(["curl", "-s", "-o", "/dev/null", "-H", header, "-r", share, url]))
    for process in running:
        if process.wait() != 0:
            raise RuntimeError(f"curl ended with {process.returncode}")
    return (time.perf_counter() - began) * info.weights_bytes / file.size


def measure(directory: Path, url: str, rate: float, rounds: int, home: Path) -> dict[str, list[float]]:
    """Return the seconds of each case, by round."""
    info = Sources(SsdCache(home / "inspected", 0), (home / "inspected-small",)).inspect(url, trust_remote_code=False)
    names = sorted(p for p in directory.iterdir() if p.name != "SHA256SUMS")
    heads = tuple(FileHead(name=p.name, size=p.stat().st_size, version="1") for p in names)
    record = EntryRecord(revision=info.revision, source=info.source, files=heads)
    seconds: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    with ExitStack() as stack:
        quick = [stack.enter_context(Peer(f"p{i}", directory, record, rate)) for i in range(_PEERS)]
        slow = stack.enter_context(Peer("slow", directory, record, rate / 10))
        for _ in range(rounds):
            add("one", load(info, quick[:1], home))
            add("three", load(info, quick, home))
            add("slow", load(info, [*quick[:2], slow], home))
            with Peer("dying", directory, record, rate) as dying:
                add("dies", load(info, [*quick[:2], dying], home, dying))
            add("curl", curl(info, record, quick))
            add("curl_slow", curl(info, record, [*quick[:2], slow]))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=400e6)
    parser.add_argument("--rate", type=float, default=60e6, help="bytes per second of each peer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--serve", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, EntryRecord.model_validate_json(sys.stdin.readline()), options.rate)
        return
    logging.disable(logging.WARNING)  # of the disabled cache
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as work:
        directory = Path(work) / "www" / "m"
        write_checkpoint(directory, tensors(megabytes=int(options.bytes / 1e6)), shards=2)
        sums = (f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(directory.iterdir()))
        (directory / "SHA256SUMS").write_text("".join(sums))
        with web_server(directory.parent) as base:
            seconds = measure(directory, f"{base}/m", options.rate, options.rounds, Path(work) / "home")
    print(machine(), f"load {os.getloadavg()[0]:.1f}")
    figures: dict[str, float] = {}
    for name, values in seconds.items():
        ratio = median(seconds["one"]) / median(values)
        print(f"{name:10} {median(values):6.2f} s ({min(values):.2f} to {max(values):.2f})  {ratio:.2f} x one")
        figures |= {f"{name}.seconds": median(values), f"{name}.over_one": ratio}
    write(options.json, figures)


if __name__ == "__main__":
    main()
