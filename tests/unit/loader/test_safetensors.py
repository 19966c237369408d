"""Invalid headers, and their errors."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from shared.dtypes import SAFETENSORS_BITS
from shared.errors import CheckpointInvalid
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.formats.safetensors import FileHeader, read_header


def parse(data: bytes) -> FileHeader:
    return read_header("x.safetensors", len(data), lambda offset, length: data[offset : offset + length])


def file_of(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def tensor(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_real_file_reads_as_the_reference_does(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tensors())
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    reference = load_file(path)
    header = parse(data)
    assert {t.name for t in header.tensors} == reference.keys()
    for t in header.tensors:
        assert t.shape == reference[t.name].shape
        assert data[t.offset : t.offset + t.nbytes] == reference[t.name].tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "too short"),
        (b"1234567", "too short"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "claims a header"),
        ((1000).to_bytes(8, "little") + b"{}", "ends inside its header"),
        (file_of(b"{not json"), "no readable"),
        (file_of(b"\xff\xfe"), "no readable"),
        (file_of(b"[" * 100_000), "no readable"),
        (file_of(b"[]"), "not an object"),
        (file_of(b'{"a": 1' + b"0" * 5000 + b"}"), "no readable"),
        (file_of({"a": 3}), "not an object"),
        (file_of({"a": tensor(dtype="F99")}, b"12345678"), "unknown dtype 'F99'"),
        (file_of({"a": tensor(dtype=None)}, b"12345678"), "unknown dtype"),
        (file_of({"a": tensor(dtype=["F32"])}, b"12345678"), "unknown dtype"),
        (file_of({"a": tensor(shape=[-2])}, b"12345678"), "shape"),
        (file_of({"a": tensor(shape=[True, 2])}, b"12345678"), "shape"),
        (file_of({"a": tensor(shape=2)}, b"12345678"), "shape"),
        (file_of({"a": tensor(offsets=[0])}, b"12345678"), "range of bytes"),
        (file_of({"a": tensor(offsets=[8, 0])}, b"12345678"), "range of bytes"),
        (file_of({"a": tensor(offsets=[-8, 0])}, b"12345678"), "range of bytes"),
        (file_of({"a": tensor(offsets=[0, 1 << 70])}, b"12345678"), "range of bytes"),
        (file_of({"a": tensor(shape=[3])}, b"12345678"), "needs 12"),
        (file_of({"a": tensor(shape=[1 << 62, 1 << 62])}, b"12345678"), "nothing can hold"),
        (file_of({"a": tensor(shape=[1 << 40, 4])}, b"12345678"), "needs"),
        (file_of({"a": tensor(), "b": tensor(offsets=[4, 12])}, b"123456789012"), "overlapping"),
        (file_of({"a": tensor(), "b": tensor()}, b"12345678"), "overlapping"),
        (file_of({"a": tensor(offsets=[4, 12])}, b"123456789012"), "to no tensor"),
        (file_of({"a": tensor()}, b"1234"), "is truncated"),
        (file_of({"a": tensor()}, b"123456789"), "is longer"),
        (
            file_of(b'{"a": ' + json.dumps(tensor()).encode() + b', "a": ' + json.dumps(tensor()).encode() + b"}", b"12345678"),
            "twice",
        ),
        (file_of({"a" * 5000: tensor()}, b"12345678"), "over 4096 characters"),
        (file_of({"a\ud800": tensor()}, b"12345678"), r"'a\\ud800', which is over 4096 characters long or no text"),
        (file_of({"a": tensor(shape=[1 << 62] * 300)}, b"12345678"), "300 dimensions"),
        (file_of({"a": tensor(shape=[0, 1 << 62, 2], offsets=[0, 0])}), "nothing can hold"),
        (file_of({"a": tensor(shape=[4, 1 << 62, 0], offsets=[0, 0])}), "nothing can hold"),
        (file_of({"a": tensor(dtype="F" * 5000)}, b"12345678"), "unknown dtype 'FFF"),
    ],
)
def test_invalid_header_fields_are_named(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointInvalid, match=message) as caught:
        parse(data)
    assert "x.safetensors" in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{" + b",".join(b'"%d":{}' % n for n in range(200_000)) + b',"199999":{}}', "'199999' occurs twice"),
        (
            b'{"a":{"dtype":"F32","shape":[' + b",".join([b"%d" % (1 << 62)] * 200_000) + b'],"data_offsets":[0,4]}}',
            "200000 dimensions",
        ),
    ],
    ids=["names", "dimensions"],
)
def test_invalid_header_of_many_tensors_is_refused_fast(header: bytes, message: str) -> None:
    """An invalid header of many parts is found fast: pairwise checks would take an hour."""
    with pytest.raises(CheckpointInvalid, match=message):
        parse(file_of(header, b"1234"))


def test_file_that_shrinks_while_read_is_refused() -> None:
    data = file_of({"a": tensor()}, b"12345678")
    with pytest.raises(CheckpointInvalid, match="shrank"):
        read_header("x", len(data), lambda offset, length: data[offset : offset + length][:-1])


def check(header: FileHeader, size: int) -> None:
    """Check what every reader of the segment relies on."""
    at = None
    for t in header.tensors:
        assert 0 <= t.offset <= t.offset + t.nbytes <= size
        assert at is None or t.offset == at
        at = t.offset + t.nbytes
    assert len({t.name for t in header.tensors}) == len(header.tensors)


@given(st.binary(max_size=200))
def test_noise_is_refused_or_sound(data: bytes) -> None:
    with contextlib.suppress(CheckpointInvalid):
        check(parse(data), len(data))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-10, 1 << 65)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(sorted(SAFETENSORS_BITS)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["dtype", "shape", "data_offsets"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4), st.binary(max_size=32))
def test_any_json_is_refused_or_sound(header: dict[str, Any], data: bytes) -> None:
    whole = file_of(header, data)
    with contextlib.suppress(CheckpointInvalid):
        check(parse(whole), len(whole))


VALID = save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.int64)})


@given(st.integers(0, len(VALID) - 1), st.integers(0, 255), st.integers(0, len(VALID)))
def test_flipped_and_cut_files_are_refused_or_sound(at: int, byte: int, cut: int) -> None:
    data = bytearray(VALID)
    data[at] = byte
    for changed in (bytes(data), bytes(data[:cut])):
        with contextlib.suppress(CheckpointInvalid):
            check(parse(changed), len(changed))


def test_small_files_with_false_sizes_use_little_memory() -> None:
    """Small files with false sizes take little memory: nothing allocates such sizes."""
    huge = (1 << 63) - 1
    lies = [
        (24_999_999).to_bytes(8, "little") + b"{}",
        (huge).to_bytes(8, "little") + b"{}",
        file_of({"a": tensor(shape=[huge] * 50, offsets=[0, huge])}),
        file_of({"a": tensor(shape=[huge], offsets=[0, huge], dtype="U8")}),
    ]
    tracemalloc.start()
    try:
        for lie in lies:
            with pytest.raises(CheckpointInvalid):
                parse(lie)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
