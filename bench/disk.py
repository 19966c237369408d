"""Common parts of the loader's benchmarks.

They are a checkpoint in Llama's shapes, files in the page cache or out of it, a levelled disk, fio,
and loads in processes that wait for a line before they begin: each measurement finds the disk in
the same state as the previous one.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

FIO_SETTINGS = ((1, 32), (4, 8), (16, 4), (16, 8))
"""Block size in MiB and queue depth."""
MB = 1024 * 1024
_HIDDEN, _INNER, _KV, _VOCAB = 2048, 5632, 512, 32000


def shapes(total: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors in Llama's shapes until their bfloat16 bytes reach `total`."""
    layer = {
        "input_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_KV, _HIDDEN),
        "self_attn.v_proj": (_KV, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
        "post_attention_layernorm": (_HIDDEN,),
    }
    yield "model.embed_tokens.weight", (_VOCAB, _HIDDEN)
    left, number = total - 4 * _VOCAB * _HIDDEN, 0
    while left > 0:
        for name, shape in layer.items():
            yield f"model.layers.{number}.{name}.weight", shape
            left -= 2 * int(np.prod(shape))
        number += 1
    yield "lm_head.weight", (_VOCAB, _HIDDEN)


def write_checkpoint(directory: Path, total: int) -> list[Path]:
    """Two shards of random bytes and their index."""
    tensors = list(shapes(total))
    half = len(tensors) // 2
    parts = {"model-00001-of-00002.safetensors": tensors[:half], "model-00002-of-00002.safetensors": tensors[half:]}
    generator = np.random.default_rng(0)
    for file, part in parts.items():
        header: dict[str, Any] = {}
        at = 0
        for name, shape in part:
            end = at + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
            at = end
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (directory / file).open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            for start in range(0, at, 64 * MB):
                out.write(generator.bytes(min(64 * MB, at - start)))
            os.fsync(out.fileno())
    weight_map = {name: file for file, part in parts.items() for name, _ in part}
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [directory / name for name in parts]


def set_cache(files: list[Path], *, warm: bool) -> None:
    """Have the page cache hold all of `files`, or nothing of them."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            if warm:
                while file.read(16 * MB):
                    pass
            else:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def level(files: list[Path]) -> None:
    """Use up the burst credit of the disk.

    Shared and virtual disks give bursts, which would favour the case after a rest.
    """
    with mmap.mmap(-1, 16 * MB) as room, memoryview(room) as into:
        for path in files:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                at = 0
                while got := os.preadv(fd, [into], at):
                    at += got
                    if at % mmap.PAGESIZE:
                        break
            finally:
                os.close(fd)


def run_fio(files: list[Path], block: int, depth: int) -> tuple[float, float]:
    """Run fio; return bytes per second, and CPU seconds for the size of `files`.

    The start of the run is left out. Its buffers are of huge pages where the kernel grants them
    (`madvise`), and touched before the clock runs. A virtual disk's request takes some 250 runs of
    memory: with small pages fio's speed depends on the fragmentation of memory, down to a third.
    """
    command = ["fio", "--name=limit", f"--filename={':'.join(map(str, files))}", "--file_service_type=sequential"]
    command += ["--rw=read", "--readonly", "--direct=1", "--ioengine=libaio", f"--bs={block}m", f"--iodepth={depth}"]
    command += ["--time_based", "--ramp_time=300ms", "--runtime=1500ms", "--output-format=json"]
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return float(job["read"]["bw_bytes"]), cpu * sum(f.stat().st_size for f in files) / job["read"]["io_bytes"]


class Loading:
    """A prepared process of a loader (bench/loader_case.py) that waits to begin."""

    def __init__(self, loader: str, files: list[Path], options: dict[str, int], python: str = sys.executable) -> None:
        self._name = loader
        order = {"loader": loader, "files": [str(f) for f in files], "options": options}
        command = [python, "-m", "bench.loader_case", json.dumps(order)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, bufsize=1
        )
        self._figures = self._read_until("ready")

    def go(self) -> dict[str, float]:
        """The figures of its load.

        It keeps its memory until `end`: what is measured next does not meet the freeing of it.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        line = self._figures or self._read_until("{")
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{self._name}: {self._errors.read().strip()[-2000:]}")
        figures: dict[str, float] = json.loads(line)
        return figures

    def _read_until(self, start: str) -> str:
        """Return the figures printed before a line that begins with `start`, else ""."""
        assert self._process.stdout is not None
        for line in iter(self._process.stdout.readline, ""):
            if line.startswith("{"):
                return line
            if line.startswith(start):
                break
        return ""

    def end(self) -> None:
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
