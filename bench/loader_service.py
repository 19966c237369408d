"""Measure a loader process without a mesh, over its Unix socket.

The cases are the DRAM tier, and models from an HTTP server. nginx serves the checkpoint where it is
installed; otherwise Python's own server does, which is then the limit.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import torch

from bench.loader_case import checksum
from shared.contracts.loader_socket import loader_socket
from shared.errors import Unreachable
from shared.ports import free_port
from weights.client import LoaderConnection, Weights, attach

_RANGE_BYTES = 16 * 1024 * 1024
_CONNECTIONS = 8
_DTYPES = {"BF16": torch.bfloat16}


@contextmanager
def loader(disk: Path, **environment: str) -> Iterator[tuple[Path, int]]:
    """A running loader with its state on `disk`: its socket and its process id."""
    with tempfile.TemporaryDirectory(prefix="thaw-bench-home-", dir=disk) as home:
        variables = {
            **os.environ,
            "THAW_HOME": home,
            "THAW_NODE": "bench",
            "THAW_NATS_URL": "nats://127.0.0.1:1",
            "THAW_LOG_LEVEL": "error",
            "THAW_PEER_HOST": "",
            **environment,
        }
        process = subprocess.Popen([sys.executable, "-m", "services.loader"], env=variables)
        path = loader_socket(Path(home) / "nodes" / "bench")
        try:
            deadline = time.monotonic() + 30
            while not _listens(path):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the loader did not start")
                time.sleep(0.01)
            yield path, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _listens(path: Path) -> bool:
    """True if the loader accepts connections: its socket exists a moment before."""
    try:
        LoaderConnection(path, timeout=30).close()
    except Unreachable:
        return False
    return True


@contextmanager
def web_server(directory: Path) -> Iterator[str]:
    """The URL of `directory`."""
    port, nginx = free_port(), shutil.which("nginx")
    with tempfile.TemporaryDirectory(prefix="thaw-bench-web-") as work:
        if nginx is None:
            command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(directory)]
        else:
            configuration = Path(work) / "nginx.conf"
            configuration.write_text(
                f"daemon off; pid {work}/pid; error_log {work}/error.log; worker_processes 2; user root;\n"
                "events { worker_connections 256; }\n"
                f"http {{ access_log off; sendfile on; server {{ listen 127.0.0.1:{port}; root {directory}; }} "
                + " ".join(f"{kind}_temp_path {work}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
                + " }\n"
            )
            command = [nginx, "-c", str(configuration), "-p", work]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _await_port(port, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/")
            connection.getresponse()
            connection.close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the web server did not start") from None
            time.sleep(0.02)


def dram(files: list[Path], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds from attaching cached weights to all tensors bound.

    The function checks that they are the right tensors.
    """
    total = sum(f.stat().st_size for f in files)
    with loader(files[0].parent.parent, THAW_DRAM_BYTES=str(2 * total)) as (path, _):
        weights = attach(path, source=str(files[0].parent), timeout=120)
        weights.wait()
        expected, weights_id = checksum(bind(weights).values()), weights.weights_id
        weights.close()
        samples = []
        for _ in range(max(5, rounds)):
            began = time.perf_counter()
            weights = _held_again(path, weights_id)
            tensors = bind(weights)
            samples.append((time.perf_counter() - began) * 1e3)
            if checksum(tensors.values()) != expected:
                raise RuntimeError("the DRAM tier gave other bytes")
            tensors.clear()
            weights.close()
    return {"dram_tier.bound_ms": samples}


def _held_again(path: Path, weights_id: str) -> Weights:
    weights = attach(path, weights_id=weights_id, timeout=20)
    if not weights.complete:
        raise Unreachable("the weights are not in the DRAM tier")
    return weights


def bind(weights: Weights) -> dict[str, torch.Tensor]:
    found = {}
    for tensor in weights.index.tensors:
        dtype = _DTYPES[tensor.dtype]
        count = tensor.nbytes // dtype.itemsize
        found[tensor.name] = torch.frombuffer(weights.buffer, dtype=dtype, count=count, offset=tensor.offset).view(tensor.shape)
    return found


def remote(files: list[Path], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way, by turns.

    The ways are a plain parallel download into existing memory, the loader without and with its
    cache on the disk, and a download to the disk that is loaded afterwards.
    """
    samples: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        samples.setdefault(f"remote.{name}", []).append(value)

    total = sum(f.stat().st_size for f in files)
    with web_server(files[0].parent) as url:
        memory = bytearray(total)
        memory[::4096] = b"\1" * len(memory[::4096])
        _download(url, files, memory)  # the server's files are in the page cache from now on
        for _ in range(rounds):
            add("download", _download(url, files, memory))
            with ExitStack() as leaving:
                ready = str(total + 64 * 1024 * 1024)
                path, pid = leaving.enter_context(
                    loader(files[0].parent.parent, THAW_CACHE_BYTES="0", THAW_DRAM_BYTES=ready, THAW_DRAM_READY_BYTES=ready)
                )
                _await_ready(pid, int(ready))
                before = _cpu_seconds(pid)
                first, seconds = _load(path, url)
                add("thaw", seconds)
                add("thaw_first_tensor", first)
                add("thaw_cpu", _cpu_seconds(pid) - before)
            with ExitStack() as leaving:
                path, _ = leaving.enter_context(loader(files[0].parent.parent, THAW_DRAM_BYTES="0"))
                first, seconds = _load(path, url)
                add("thaw_kept_on_disk", seconds)
                add("download_then_load", _download_then_load(url, files, path))
    return samples


def _load(path: Path, url: str) -> tuple[float, float]:
    """Seconds to the first tensor, and to the last byte."""
    began = time.perf_counter()
    with attach(path, source=url, timeout=300) as weights:
        first = 0.0
        for _, data in weights.tensors():
            first = first or time.perf_counter() - began
            data.release()
        return first, time.perf_counter() - began


def _download(url: str, files: list[Path], memory: bytearray) -> float:
    """Seconds of ranges over a few connections, each into its place."""
    ranges, at = [], 0
    for file in files:
        size = file.stat().st_size
        for low in range(0, size, _RANGE_BYTES):
            high = min(size, low + _RANGE_BYTES)
            ranges.append((file.name, low, high, at + low))
        at += size
    todo, lock, view = iter(ranges), threading.Lock(), memoryview(memory)

    def work() -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        while True:
            with lock:
                job = next(todo, None)
            if job is None:
                connection.close()
                return
            name, low, high, place = job
            connection.request("GET", f"/{name}", headers={"Range": f"bytes={low}-{high - 1}"})
            answer = connection.getresponse()
            done = place
            while done < place + high - low:
                got = answer.readinto(view[done : place + high - low])
                if not got:
                    raise RuntimeError("the download was cut")
                done += got
            answer.read()

    began = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def _download_then_load(url: str, files: list[Path], path: Path) -> float:
    """Without a pipeline: all to the disk, then from there."""
    with tempfile.TemporaryDirectory(prefix="thaw-bench-copy-", dir=files[0].parent.parent) as copy:
        began = time.perf_counter()
        for file in files:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
            connection.request("GET", f"/{file.name}")
            with (Path(copy) / file.name).open("wb") as out:
                shutil.copyfileobj(connection.getresponse(), out, _RANGE_BYTES)
                os.fsync(out.fileno())
            connection.close()
        for small in files[0].parent.glob("*.json"):
            shutil.copy(small, copy)
        with attach(path, source=copy, timeout=300) as weights:
            weights.wait()
        return time.perf_counter() - began


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _await_ready(pid: int, ready: int) -> None:
    """Wait until all chunks of the loader's pool have memory.

    Otherwise the load would have to allocate more.
    """
    process, deadline = psutil.Process(pid), time.monotonic() + 120
    while process.memory_info().rss < ready and time.monotonic() < deadline:
        time.sleep(0.05)
