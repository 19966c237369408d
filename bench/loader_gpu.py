"""The loader's way into GPU memory against what the hardware gives: a pinned cudaMemcpy, and fio.

    python -m bench.loader_gpu [--bytes 4GB] [--rounds N] [--devices 0,1] [--directory DIR]
        [--no-disk] [--json PATH]

- curve:     copies of 64 KiB to 64 MiB from page-locked memory, back to back, and the elbow that
             copies are grouped at;
- DRAM:      `--bytes` in chunks of 16 MiB through the loader's device, against one cudaMemcpyAsync
             for each chunk, all queued at once. Both from memory that is page-locked already, as
             the pool's is; the speed of page-locking is printed beside it;
- small:     the same bytes given in ranges of 256 KiB, grouped, and copied one by one;
- devices:   the same to every device at the same time;
- SSD:       a cold file of `--bytes` by direct reads of 16 MiB from four threads, each chunk on its
             way to the device as soon as it is there, against fio's best setting for the same file.

Best of the rounds, interleaved; GB are 10^9 bytes. Every load is checked against its source.
Without a GPU: one line, status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.disk import FIO_SETTINGS, run_fio, set_cache
from bench.report import write
from shared.errors import DeviceFailed, DeviceMissing
from thaw.units import parse_size
from weights.devices.cuda import CudaDevice
from weights.devices.cuda_runtime import load_cuda
from weights.devices.curve import find_elbow
from weights.devices.driver import CudaDriver, DeviceFacts
from weights.devices.pinning import Pins
from weights.devices.port import Place
from weights.devices.probe import measure

CHUNK = 16 * 1024 * 1024
SMALL = 256 * 1024
READERS = 4
NO_DEVICE = 2


class HostMemory:
    """Page-locked memory of whole chunks, registered chunk by chunk as the pool's are."""

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self.nbytes = nbytes
        self.map = mmap.mmap(-1, nbytes)
        self._anchor = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._anchor)
        self.pins = Pins(driver)
        block = os.urandom(CHUNK)
        for at in range(0, nbytes, CHUNK):
            self.map[at : at + CHUNK] = block[: nbytes - at]
            self.map[at : at + 8] = at.to_bytes(8, "little")
        began = time.monotonic()
        for at in range(0, nbytes, CHUNK):
            self.pins.pin(self.address + at, min(CHUNK, nbytes - at))
        self.pin_seconds = time.monotonic() - began

    def close(self) -> None:
        self.pins.close()
        del self._anchor
        self.map.close()


class Bench:
    """Devices that share `host`; each has its own arena for one measurement."""

    def __init__(self, driver: CudaDriver, facts: Sequence[DeviceFacts], nbytes: int, group: int) -> None:
        self.driver, self.facts, self.nbytes = driver, facts, nbytes
        driver.use(facts[0].index)
        self.host = HostMemory(driver, nbytes)
        # Theirs too: a group of copies must not reach over two registrations.
        self.devices = [CudaDevice(driver, f, group, pins=self.host.pins) for f in facts]

    def close(self) -> None:
        for device in self.devices:
            device.close()
        self.driver.use(self.facts[0].index)
        self.host.close()

    def measure_plain(self, facts: DeviceFacts) -> float:
        """Return bytes per second of one queued cudaMemcpyAsync for each chunk.

        No copy may reach over two chunks. The result is the bandwidth of the bus.
        """
        self.driver.use(facts.index)
        stream, target = self.driver.stream(urgent=True), self.driver.allocate(self.nbytes)
        try:
            began = time.monotonic()
            for at in range(0, self.nbytes, CHUNK):
                self.driver.copy(target + at, self.host.address + at, min(CHUNK, self.nbytes - at), stream)
            self.driver.wait(self.driver.record(stream))
            return self.nbytes / (time.monotonic() - began)
        finally:
            self.driver.free(target)
            self.driver.destroy_stream(stream)

    def one_by_one(self, facts: DeviceFacts, size: int) -> float:
        """Measure synchronous copies of `size`: a loader that copies tensor by tensor."""
        self.driver.use(facts.index)
        stream, target = self.driver.stream(urgent=True), self.driver.allocate(self.nbytes)
        try:
            began = time.monotonic()
            for at in range(0, self.nbytes, size):
                self.driver.copy(target + at, self.host.address + at, min(size, self.nbytes - at), stream)
                self.driver.wait(self.driver.record(stream))
            return self.nbytes / (time.monotonic() - began)
        finally:
            self.driver.free(target)
            self.driver.destroy_stream(stream)

    def measure_loaded(self, devices: Sequence[CudaDevice], size: int = CHUNK) -> float:
        """Return bytes per second, over all `devices`, of copying the whole host memory.

        Each device gets it in ranges of `size`.
        """
        arenas = [d.allocate(Place("bench", self.nbytes, "")) for d in devices]
        began = time.monotonic()
        for at in range(0, self.nbytes, size):
            for arena in arenas:
                arena.fill(at, self.host.address + at, min(size, self.nbytes - at))
        for arena in arenas:
            arena.wait(self.nbytes)
        seconds = time.monotonic() - began
        for device, arena in zip(devices, arenas, strict=True):
            self._check(device, arena.address)
            arena.release()
        return self.nbytes * len(devices) / seconds

    def from_disk(self, path: Path) -> float:
        """Return bytes per second from a cold file to the first device.

        Chunks are copied while others are read.
        """
        set_cache([path], warm=False)
        arena = self.devices[0].allocate(Place("bench", self.nbytes, ""))
        todo, lock = iter(range(0, self.nbytes, CHUNK)), threading.Lock()
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)

        def read() -> None:
            while True:
                with lock:
                    at = next(todo, None)
                if at is None:
                    return
                length = min(CHUNK, self.nbytes - at)
                with memoryview(self.host.map)[at : at + length] as target:
                    if os.preadv(fd, [target], at) != length:
                        raise OSError(f"{path} was read short at {at}")
                arena.fill(at, self.host.address + at, length)

        try:
            began = time.monotonic()
            with ThreadPoolExecutor(READERS) as readers:
                for done in [readers.submit(read) for _ in range(READERS)]:
                    done.result()
            arena.wait(self.nbytes)
            seconds = time.monotonic() - began
            self._check(self.devices[0], arena.address)
            return self.nbytes / seconds
        finally:
            os.close(fd)
            arena.release()

    def _check(self, device: CudaDevice, address: int) -> None:
        """Compare a part of every chunk with the host's."""
        self.driver.use(device.facts.index)
        for at in range(0, self.nbytes, CHUNK):
            length = min(65536, self.nbytes - at)
            seen = ctypes.create_string_buffer(length)
            self.driver.copy_back(ctypes.addressof(seen), address + at, length)
            if seen.raw != self.host.map[at : at + length]:
                raise DeviceFailed(f"{device.device_id} does not hold what was copied to it at {at}")


def no_disk_because(directory: Path | None) -> str | None:
    """Why nothing can be measured from a disk here; None if it can."""
    if shutil.which("fio") is None:
        return "there is no fio (apt install fio)"
    with tempfile.NamedTemporaryFile(dir=directory) as probe:
        try:
            os.close(os.open(probe.name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
        except OSError:
            return f"{Path(probe.name).parent} has no direct I/O (name a directory on the disk with --directory)"
    return None


def fio_limit(file: Path) -> float:
    """Bytes per second of fio at the best of its settings, each from the disk."""
    speeds = []
    for block, depth in FIO_SETTINGS:
        set_cache([file], warm=False)
        speeds.append(run_fio([file], block, depth)[0])
    return max(speeds)


def figures_of(bench: Bench, rounds: int, file: Path | None) -> dict[str, float]:
    """Every figure in GB/s, and ratios to the limit measured in the same run."""
    first, device = bench.facts[0], bench.devices[0]
    cases: dict[str, Callable[[], float]] = {
        "dram_limit_gb_per_s": lambda: bench.measure_plain(first),
        "dram_gb_per_s": lambda: bench.measure_loaded([device]),
        "small_grouped_gb_per_s": lambda: bench.measure_loaded([device], SMALL),
        "small_one_by_one_gb_per_s": lambda: bench.one_by_one(first, SMALL),
    }
    if len(bench.devices) > 1:
        cases["devices_together_gb_per_s"] = lambda: bench.measure_loaded(bench.devices)
        for other in bench.devices[1:]:
            cases[f"alone_{other.device_id}_gb_per_s"] = partial(bench.measure_loaded, [other])
    if file is not None:
        cases["ssd_limit_gb_per_s"] = lambda: fio_limit(file)
        cases["ssd_gb_per_s"] = lambda: bench.from_disk(file)
    best = dict.fromkeys(cases, 0.0)
    for _ in range(rounds):
        for name, case in cases.items():
            best[name] = max(best[name], case() / 1e9)
    best["dram_ratio"] = best["dram_gb_per_s"] / best["dram_limit_gb_per_s"]
    if file is not None:
        best["ssd_ratio"] = best["ssd_gb_per_s"] / best["ssd_limit_gb_per_s"]
    if len(bench.devices) > 1:
        alone = best["dram_gb_per_s"] + sum(v for name, v in best.items() if name.startswith("alone_"))
        best["devices_ratio"] = best["devices_together_gb_per_s"] / alone
    return best


@contextlib.contextmanager
def disk_file(directory: Path | None, bench: Bench) -> Iterator[Path]:
    """A file with what the host memory holds, gone afterwards."""
    with tempfile.TemporaryDirectory(dir=directory) as made:
        path = Path(made) / "weights"
        with path.open("wb") as out:
            out.write(bench.host.map)
            os.fsync(out.fileno())
        yield path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.loader_gpu", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--bytes", type=parse_size, default=4 * 10**9, help="at least 64 MiB; rounded down to whole chunks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=lambda text: [int(n) for n in text.split(",")], help="CUDA's indices; default: all")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary directory")
    parser.add_argument("--no-disk", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        driver = load_cuda()
    except DeviceMissing as e:
        print(f"nothing measured: {e.message}", file=sys.stderr)
        return NO_DEVICE
    indices = options.devices if options.devices is not None else list(range(driver.count()))
    facts = [driver.facts(n) for n in indices]
    console = Console(stderr=True)
    if not options.no_disk and (why := no_disk_because(options.directory)) is not None:
        console.print(f"no figures from the disk: {why}", highlight=False)
        options.no_disk = True
    points = measure(driver, facts[0])
    for point in points:
        console.print(f"copies of {point.nbytes // 1024:6d} KiB: {point.bytes_per_second / 1e9:6.2f} GB/s")
    group = find_elbow(points)
    bench = Bench(driver, facts, max(options.bytes, 4 * CHUNK) // CHUNK * CHUNK, group)
    try:
        with contextlib.ExitStack() as stack:
            file = None if options.no_disk else stack.enter_context(disk_file(options.directory, bench))
            figures = figures_of(bench, options.rounds, file)
        figures["pin_gb_per_s"] = bench.nbytes / bench.host.pin_seconds / 1e9
    finally:
        bench.close()
    figures |= {"elbow_kib": group / 1024, "bytes": float(bench.nbytes), "devices": float(len(facts))}
    figures |= {f"copy_{p.nbytes // 1024}_kib_gb_per_s": p.bytes_per_second / 1e9 for p in points}
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    write(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
