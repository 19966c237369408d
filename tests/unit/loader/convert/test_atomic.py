"""However a conversion ends, DST is complete or absent."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import CheckpointInvalid, Unavailable
from tests.support.stopping import killed_at_exit
from tests.unit.loader.checkpoints import tensors, write_checkpoint, write_sparse_checkpoint
from tests.unit.loader.convert.models import some_weights, write_torch
from weights.convert import disk
from weights.convert.job import convert
from weights.formats.checkpoint import open_checkpoint
from weights.formats.verify import verify

DRAFT = ".out.converting"
CONVERT = (sys.executable, "-m", "weights.convert")


def limited(nbytes: int) -> Any:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def test_kill_at_every_disk_write_leaves_a_complete_or_absent_destination(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", shards=2)
    command = (sys.executable, "-m", "tests.unit.loader.convert.dying", str(tmp_path / "m"), str(tmp_path / "out"))
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    *deaths, last = [json.loads(line) for line in lines]
    assert {d["call"] for d in deaths} == {"mkdir", "pwrite", "ftruncate", "fsync", "rename"}
    assert all(d["status"] == -signal.SIGKILL for d in deaths)
    renamed = [d["call"] for d in deaths].index("rename")
    assert all(d["beside"] in (["m"], [DRAFT, "m"]) for d in deaths[: renamed + 1])
    assert all(d["beside"] == ["m", "out"] for d in deaths[renamed + 1 :])
    # The next conversion removed the last one's remains, and left a complete checkpoint.
    assert last == {"call": "", "status": 0, "beside": ["m", "out"]}
    verify(tmp_path / "out")


def begin_conversion(directory: Path) -> subprocess.Popen[str]:
    """Begin to convert `m` into `out`; the conversion waits after its first line of progress."""
    write_checkpoint(directory / "m", tensors(megabytes=3))
    command = (sys.executable, "-m", "tests.unit.loader.convert.held", str(directory / "m"), str(directory / "out"))
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["stage"] == "convert"
    return child


def test_draft_of_a_killed_conversion_is_not_a_model(tmp_path: Path) -> None:
    with killed_at_exit(begin_conversion(tmp_path)) as child:
        child.kill()
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointInvalid, match="has no weights"):
        open_checkpoint(tmp_path / DRAFT)
    convert(tmp_path / "m", tmp_path / "out", check=True)
    assert not (tmp_path / DRAFT).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_conversion_leaves_no_files(tmp_path: Path, number: signal.Signals) -> None:
    with killed_at_exit(begin_conversion(tmp_path)) as child:
        child.send_signal(number)
        assert child.wait(60) == 130
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_conversion_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """A conversion ends if its parent does.

    `thaw convert` was killed: its child notices, and does not continue for hours.
    """
    with killed_at_exit(begin_conversion(tmp_path)) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        child.stdin.close()  # it continues
        assert child.wait(60) == 128 + signal.SIGPIPE
        assert child.stderr.read() == ""
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_file_size_limit_is_reported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tensors(megabytes=3))
    done = subprocess.run(
        (*CONVERT, str(tmp_path / "m"), str(tmp_path / "out")),
        capture_output=True,
        text=True,
        preexec_fn=limited(1 << 20),
        check=False,
    )
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert (done.returncode, error["code"]) == (1, "unavailable")
    assert "weights-00000-of-00001.thaw could not be written: File too large; free some space" in error["message"]
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_a_full_disk_is_seen_before(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    write_sparse_checkpoint(tmp_path / "m", stat.f_blocks * stat.f_frsize)
    with pytest.raises(Unavailable, match="free some space or name another disk"):
        convert(tmp_path / "m", tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


@pytest.mark.root
@pytest.mark.parametrize("size", [200_000, 310_000])
def test_full_disk_leaves_no_files(tmp_path: Path, size: int) -> None:
    """A small disk is full in the weights, or in the small files.

    The check of free space beforehand is only approximate.
    """
    write_checkpoint(tmp_path / "m", tensors(megabytes=0.3))
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps("t" * 300_000))
    (tmp_path / "disk").mkdir()
    mounted = subprocess.run(
        ("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path / "disk")), capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        with pytest.raises(Unavailable, match="free some space"):
            convert(tmp_path / "m", tmp_path / "disk" / "out")
        assert list((tmp_path / "disk").iterdir()) == []
    finally:
        subprocess.run(("umount", str(tmp_path / "disk")), check=True)


@pytest.mark.parametrize("lacking", ["weights", "tokenizer", "index"])
def test_disk_that_fills_up_during_the_conversion_leaves_no_files(
    tmp_path: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk becomes full during a conversion.

    Faults of the write calls simulate that; test_full_disk_leaves_no_files uses a real full disk.
    """
    weights = write_checkpoint(tmp_path / "m", tensors(megabytes=0.3))
    small = sum(p.stat().st_size for p in (tmp_path / "m").iterdir() if p.suffix == ".json")
    enough = sum(w.nbytes for w in weights.values())
    left = [{"weights": enough - 1, "tokenizer": enough + small - 1, "index": enough + small}[lacking]]
    pwrite, write_file = os.pwrite, disk.write_file

    def limited_pwrite(fd: int, data: memoryview, offset: int) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    def limited_file(path: Path, data: bytes) -> None:
        left[0] -= len(data)
        if left[0] < 0:
            raise disk.disk_error(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        write_file(path, data)

    monkeypatch.setattr(os, "pwrite", limited_pwrite)
    monkeypatch.setattr("weights.convert.job.write_file", limited_file)
    monkeypatch.setattr("weights.convert.companions.write_file", limited_file)
    with pytest.raises(Unavailable, match="No space left on device; free some space"):
        convert(tmp_path / "m", tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_source_that_changes_during_the_conversion_is_refused(tmp_path: Path, name: str) -> None:
    if name.endswith(".bin"):
        write_torch(tmp_path / "m", some_weights())
    else:
        write_checkpoint(tmp_path / "m", tensors(megabytes=10))

    def progress(stage: str, done: int, total: int) -> None:
        os.utime(tmp_path / "m" / name, ns=(1, 1))

    with pytest.raises(CheckpointInvalid, match="changed while it was read"):
        convert(tmp_path / "m", tmp_path / "out", progress=progress)
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Memory use does not grow with the model: 512 MiB convert in 250 MB of memory."""
    write_sparse_checkpoint(tmp_path / "m", 1 << 29)
    limit = 250_000_000
    done = subprocess.run(
        (*CONVERT, str(tmp_path / "m"), str(tmp_path / "out"), "--verify"),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        check=False,
    )
    (tmp_path / "out" / "weights-00000-of-00001.thaw").unlink(missing_ok=True)
    report = json.loads(done.stdout.splitlines()[-1])["report"]
    assert report["bytes"] == 1 << 29
    assert report["peak_bytes"] < limit
