"""Damaged PyTorch files give a typed error or a checkpoint, never a crash or both.

Bits are flipped and files cut anywhere.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.errors import CheckpointInvalid
from tests.support.examples import examples
from tests.unit.loader.convert.models import same, some_weights, stored
from weights.convert.job import convert
from weights.formats.verify import verify


def saved(legacy: bool) -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.arange(6.0), "b": torch.ones(2, 2)}, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


ARCHIVE, LEGACY = saved(False), saved(True)


@settings(max_examples=examples(150), deadline=None)
@given(st.booleans(), st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.none() | st.floats(0, 1))
@example(False, 0.0, 0, None)
def test_flipped_and_cut_files(legacy: bool, place: float, byte: int, cut: float | None) -> None:
    data = bytearray(LEGACY if legacy else ARCHIVE)
    data[int(place * len(data))] = byte
    if cut is not None:
        del data[int(cut * len(data)) :]
    directory = Path(tempfile.mkdtemp())
    try:
        (directory / "some.pt").write_bytes(data)
        with contextlib.suppress(CheckpointInvalid):
            convert(directory / "some.pt", directory / "out")
        left = sorted(p.name for p in directory.iterdir())
        assert left in (["some.pt"], ["out", "some.pt"])
        if "out" in left:
            verify(directory / "out")
    finally:
        shutil.rmtree(directory)


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", LEGACY[:40], ARCHIVE[:200]]))
def test_random_bytes_are_refused(noise: bytes, before: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "some.pt").write_bytes(before + noise)
        with pytest.raises(CheckpointInvalid, match=r"some\.pt"):
            convert(Path(name) / "some.pt", Path(name) / "out")


def test_bits_flipped_in_the_data_of_an_archive_are_always_seen(tmp_path: Path) -> None:
    weights = some_weights()
    torch.save(weights, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    for at in range(0, len(data), len(data) // 20):
        changed = bytearray(data)
        changed[at] ^= 1
        (tmp_path / "some.pt").write_bytes(changed)
        try:
            convert(tmp_path / "some.pt", tmp_path / "out")
        except CheckpointInvalid:
            continue
        assert same(weights, stored(tmp_path / "out"))  # the bit was in the archive's own padding
        shutil.rmtree(tmp_path / "out")
