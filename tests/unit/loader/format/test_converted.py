"""Invalid indexes of converted checkpoints, and their errors."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.dtypes import DTYPE_BITS, row_major
from shared.errors import CheckpointInvalid
from tests.support.examples import examples
from weights.formats.checkpoint import open_checkpoint
from weights.formats.converted import (
    ALIGNMENT,
    INDEX_NAME,
    MAX_INDEX_BYTES,
    Entry,
    Index,
    Partition,
    parse_index,
    partition_name,
    write_index,
)
from weights.formats.segment import lay_out

HASH = hashlib.sha256(bytes(8)).hexdigest()
NAME = partition_name(0, 1)
BIG = (1 << 63) - 1


def entry(name: str = "a", offset: int = 0, shape: tuple[int, ...] = (2,), **more: Any) -> dict[str, Any]:
    size = 4 * (shape[0] if shape else 1)
    found = {"name": name, "rank": 0, "offset": offset, "size": size, "shape": shape, "stride": row_major(shape), "dtype": "F32"}
    return {**found, "dim": None, "sha256": HASH, **more}


def index(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    listed = entries or (entry(), entry("b", ALIGNMENT))
    partition = {"rank": 0, "file": NAME, "size": 4096, "tensors": len(listed)}
    found: dict[str, Any] = {"format": "thaw-checkpoint", "version": 1, "alignment": 256, "ranks": 1, "partitions": [partition]}
    return {**found, "tensors": list(listed), **more}


def sealed(content: dict[str, Any] | bytes) -> bytes:
    """Return an index with a correct checksum, so that later checks find its errors.

    Args:
        content: The index; as bytes, the lines of its tensors.
    """
    head = index() if isinstance(content, bytes) else content
    lines = content if isinstance(content, bytes) else b",\n".join(json.dumps(t).encode() for t in content["tensors"])
    first = json.dumps({k: v for k, v in head.items() if k != "tensors"}).encode().removesuffix(b"}")
    return signed(first + b',"tensors":[\n' + lines + b"\n]")


def signed(body: bytes) -> bytes:
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def check(found: Index) -> None:
    """Check what readers rely on."""
    sizes = {p.rank: p.size for p in found.partitions}
    assert sorted(sizes) == list(range(found.ranks))
    places: dict[int, list[tuple[int, int]]] = {rank: [] for rank in sizes}
    for t in found.tensors:
        assert 0 <= t.offset <= t.offset + t.size <= sizes[t.rank]
        assert t.offset % ALIGNMENT == 0
        elements = 1
        for n in t.shape:
            elements *= n
        assert elements * DTYPE_BITS[t.dtype] == t.size * 8
        places[t.rank].append((t.offset, t.offset + t.size))
    for ranges in places.values():
        distinct = sorted({r for r in ranges if r[0] < r[1]})
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(distinct))


def test_written_index_is_read_back() -> None:
    tied = entry("c", ALIGNMENT)
    content = index(entry(), entry("b", ALIGNMENT), tied, entry("none", 512, (0, 4), size=0), entry("one", 768, ()))
    data = write_index(
        [Partition.model_validate(p) for p in content["partitions"]], [Entry.model_validate(t) for t in content["tensors"]]
    )
    assert data == data.strip() + b"\n"
    assert json.loads(data)["tensors"][2]["offset"] == ALIGNMENT
    check(parse_index(data, "x"))
    check(parse_index(sealed(content), "x"))


def partitions(**change: Any) -> dict[str, Any]:
    return index(partitions=[{**index()["partitions"][0], **change}])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no valid index"),
        (b"\xff\xfe", "no valid index"),
        (b"[" * 1_000_000, "no valid index"),
        (b'{"tensors":' + b"[" * 1_000_000, "no valid index"),
        (b'{"a":' * 100_000, "no valid index"),
        (sealed(b"[]"), "tensor 0: "),
        (sealed(b"{},\n" * 100_000), r"tensor 0\.name: Field required"),
        (sealed(b" " * (1 << 20)), "tensor 0 is described in more than"),
        (sealed(json.dumps(entry()).encode() + b",\n"), "a comma follows"),
        (signed(b'{"format":"thaw-checkpoint","version":1,"alignment":256,"tensors":[\n\n]'), r"first line\.ranks: Field required"),
        (signed(b'{"format":"thaw-checkpoint","version":1,"tensors":[]'), "its first line"),
        (b'{"format":"thaw-checkpoint","version":3}', "has version 3"),
        (sealed(index(version=2)), "has version 2, and this Thaw reads version 1"),
        (sealed(index(version=-1)), "has version -1"),
        (sealed(index(format="other")), "format"),
        (sealed(index(alignment=64)), "alignment"),
        (sealed(index(ranks=0)), "ranks"),
        (sealed(index(ranks=True)), "ranks"),
        (sealed(index(ranks=10**30)), "ranks"),
        (sealed(index(ranks=2)), "for 2 ranks and lists 1 partitions"),
        (sealed(index(partitions=[])), "for 1 ranks and lists 0"),
        (sealed(index(partitions=index()["partitions"] * 2)), "for 1 ranks and lists 2"),
        (sealed(partitions(rank=1)), "do not match"),
        (sealed(partitions(file="../secret")), "names the file '../secret'"),
        (sealed(partitions(file="/etc/passwd")), "names the file"),
        (sealed(partitions(file="config.json")), "names the file"),
        (sealed(partitions(size=-1)), r"first line\.partitions\.0\.size"),
        (sealed(partitions(size=1 << 63)), r"first line\.partitions\.0\.size"),
        (sealed(partitions(size=4096.5)), r"first line\.partitions\.0\.size"),
        (sealed(partitions(tensors=3)), "has 3 tensors and lists 2"),
        (sealed(index(entry(), partitions=index()["partitions"])), "has 2 tensors and lists 1"),
        (sealed(index(tensors=[], partitions=[{**index()["partitions"][0], "tensors": 0}])), "lists 0"),
        (sealed(index(entry(name=""))), r"tensor 0\.name"),
        (sealed(index(entry(name="a" * 5000))), r"tensor 0\.name"),
        (sealed(index(entry(), entry(offset=256))), "twice"),
        (sealed(index(entry(rank=1))), "to rank 1 of 1"),
        (sealed(index(entry(offset=-256))), r"tensor 0\.offset"),
        (sealed(index(entry(offset=8))), "not on a multiple of 256"),
        (sealed(index(entry(offset=4096))), "beyond the end"),
        (sealed(index(entry(offset=BIG // 256 * 256))), "beyond the end"),
        (sealed(index(entry(shape=(2048,)))), "beyond the end"),
        (sealed(index(entry(shape=(BIG,) * 64, size=8, stride=(1,) * 64))), "nothing can hold"),
        (sealed(index(entry(shape=(4, 1 << 62, 0), size=0, stride=(1 << 62, 1, 1)))), "nothing can hold"),
        (sealed(index(entry(shape=(1,) * 65))), r"tensor 0\.shape"),
        (sealed(index(entry(shape=(-2,), size=8))), r"tensor 0\.shape\.0"),
        (sealed(index(entry(shape=(True, 2), stride=[2, 1]))), r"tensor 0\.shape\.0"),
        (sealed(index(entry(size=4))), "does not take"),
        (sealed(index(entry(dtype="F99"))), "unknown dtype 'F99'"),
        (sealed(index(entry(dtype="F4", shape=(3,), size=1))), "does not take"),
        (sealed(index(entry(stride=[2]))), "not row-major"),
        (sealed(index(entry(stride=[]))), "not row-major"),
        (sealed(index(entry(dim=1))), "dimension that it does not have"),
        (sealed(index(entry(sha256="00"))), r"tensor 0\.sha256"),
        (sealed(index(entry(), entry("b", 0, (3,)))), "overlapping"),
        (sealed(index(entry(shape=(128,)), entry("b", 256))), "overlapping"),
        (sealed(index(entry(), entry("b", 0, sha256="0" * 64))), "overlapping"),
        (sealed(index(entry(), entry("b", 0, dtype="I32"))), "overlapping"),
        (json.dumps({**index(), "sha256": HASH}).encode() + b"\n", "its first line"),
        (sealed(index()).replace(b'"offset": 256', b'"offset": 512'), "checksum is wrong"),
        (sealed(index()) + b" ", "checksum is wrong"),
    ],
)
def test_invalid_index_fields_are_named(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointInvalid, match=message) as caught:
        parse_index(data, "m/thaw.index.json")
    assert caught.value.message.startswith("m/thaw.index.json ")
    assert len(caught.value.message) < 500


VALID = write_index(
    [Partition(rank=0, file=NAME, size=4096, tensors=2)],
    [Entry.model_validate(t) for t in (entry(), entry("b", ALIGNMENT))],
)


@given(st.integers(0, len(VALID) - 1), st.integers(0, 7), st.integers(0, len(VALID)))
def test_any_flipped_bit_and_any_cut_is_seen(at: int, bit: int, cut: int) -> None:
    flipped = bytearray(VALID)
    flipped[at] ^= 1 << bit
    for changed in (bytes(flipped), VALID[:cut]):
        if changed.strip() != VALID.strip():
            with pytest.raises(CheckpointInvalid):
                parse_index(changed, "x")


ODD = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(0, 9), max_size=3)
)
FIELDS = st.sampled_from(["name", "rank", "offset", "size", "shape", "stride", "dtype", "dim", "sha256", "extra"])


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.builds(
            lambda name, offset, shape, odd: {**entry(name, offset * ALIGNMENT, (shape,)), **odd},
            st.sampled_from("abcd"),
            st.integers(-1, 20),
            st.integers(0, 200),
            st.dictionaries(FIELDS, ODD | st.sampled_from(sorted(DTYPE_BITS)), max_size=1),
        ),
        max_size=4,
    ),
    st.integers(0, 5000),
    st.integers(0, 5),
)
def test_any_index_is_refused_or_sound(tensors: list[dict[str, Any]], size: int, count: int) -> None:
    content = index(tensors=tensors, partitions=[{"rank": 0, "file": NAME, "size": size, "tensors": count}])
    with contextlib.suppress(CheckpointInvalid):
        check(parse_index(sealed(content), "x"))


@pytest.mark.parametrize("line", [b"{},\n", b"1,\n", b"[],\n", b'{"name":1},\n', b'"a":', b"[", b"\n"])
def test_hostile_lines_use_little_memory(line: bytes) -> None:
    data = sealed(line * (2_000_000 // len(line)))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointInvalid):
            parse_index(data, "x")
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300) | st.text(alphabet='{}[]:,"0123456789-.eE tensors', max_size=300).map(str.encode))
def test_random_bytes_are_refused(data: bytes) -> None:
    for one in (data, sealed(data)):
        with pytest.raises(CheckpointInvalid):
            parse_index(one, "x")


def test_small_files_with_false_sizes_use_little_memory() -> None:
    """Small files with false sizes take little memory: nothing allocates such sizes."""
    lies = [index(entry(shape=(BIG,) * 64, size=8, stride=(1,) * 64)), partitions(size=BIG, tensors=BIG), index(ranks=1024)]
    tracemalloc.start()
    try:
        for lie in lies:
            with pytest.raises(CheckpointInvalid):
                parse_index(sealed(lie), "x")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# -- in a directory --------------------------------------------------------------------------------


def write(directory: Path, content: bytes = VALID) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / INDEX_NAME).write_bytes(content)
    (directory / NAME).write_bytes(bytes(4096))
    return directory


def test_converted_checkpoint_has_the_usual_layout(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m"))
    layout = lay_out(checkpoint, "id")
    assert layout.total_bytes == layout.places[0].offset + 4096
    assert [t.sha256 for t in checkpoint.files[0].header.tensors] == [HASH, HASH]


def relink(path: Path, target: Path) -> None:
    path.replace(target)
    path.symlink_to(target)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: (m / NAME).unlink(), f"{NAME} is missing"),
        (lambda m: os.truncate(m / NAME, 4095), f"{NAME} has 4095 bytes instead of 4096"),
        (lambda m: os.truncate(m / NAME, 5000), "has 5000 bytes"),
        (lambda m: relink(m / NAME, m.parent / "elsewhere"), f"{NAME} is a link to .*outside"),
        (lambda m: relink(m / INDEX_NAME, m.parent / "elsewhere"), f"{INDEX_NAME} is a link to .*outside"),
        (lambda m: ((m / NAME).unlink(), (m / NAME).mkdir()), "not a regular file"),
        (lambda m: pipe(m / INDEX_NAME), "not a regular file"),
        (lambda m: pipe(m / NAME), "not a regular file"),
        (lambda m: os.truncate(m / INDEX_NAME, MAX_INDEX_BYTES + 1), "is over"),
        (lambda m: os.truncate(m / INDEX_NAME, 100), "no valid index"),
    ],
)
def test_damaged_directory_is_refused(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(write(tmp_path / "m"))
    with pytest.raises(CheckpointInvalid, match=message):
        open_checkpoint(tmp_path / "m")
