"""Valid and invalid checkpoint directories, and their segments."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shared.contracts.segment import HEADER_BYTES, PAGE, SegmentHeader, SegmentIndex
from shared.errors import CheckpointInvalid
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.formats.checkpoint import INDEX, directory_revision, open_checkpoint, weight_names
from weights.formats.segment import lay_out

SHARD = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"


def edit_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = directory / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path, shards=2)
    (tmp_path / "consolidated.safetensors").write_bytes(b"another copy, in no index")
    found = open_checkpoint(tmp_path)
    assert [f.name for f in found.files] == [SHARD, OTHER]
    assert {t.name for f in found.files for t in f.header.tensors} == weights.keys()


def test_weight_files_are_selected_by_preference() -> None:
    assert weight_names({"model.safetensors", INDEX, "x.safetensors"}, "m") == ("model.safetensors",)
    assert weight_names({INDEX, SHARD}, "m") is None
    assert weight_names({"other.safetensors", "adapter/x.safetensors"}, "m") == ("other.safetensors",)


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ({"config.json"}, "has no weights"),
        ({"pytorch_model.bin"}, "PyTorch weights only"),
        ({SHARD, OTHER}, f"no {INDEX}"),
    ],
)
def test_unsupported_weight_files_are_refused(present: set[str], message: str) -> None:
    with pytest.raises(CheckpointInvalid, match=message):
        weight_names(present, "m")


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/secret.safetensors",
        "/etc/secret.safetensors",
        "sub/x.safetensors",
        "..",
        ".safetensors",
        "a\\b.safetensors",
        "x.bin",
        "\ud800.safetensors",
        "",
    ],
)
def test_index_with_paths_outside_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, shards=2)
    edit_index(tmp_path, lambda m: m.update({"scalar": name}))
    with pytest.raises(CheckpointInvalid, match="only names of"):
        open_checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / OTHER).unlink()
    with pytest.raises(CheckpointInvalid, match=f"{OTHER} is missing"):
        open_checkpoint(tmp_path)


def test_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    edit_index(tmp_path, lambda m: m.update({"ghost": SHARD}))
    with pytest.raises(CheckpointInvalid, match=f"'ghost' in {SHARD}"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / OTHER).write_bytes((tmp_path / SHARD).read_bytes())
    with pytest.raises(CheckpointInvalid, match=f"is in {SHARD} and in {OTHER}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": {"a": 3}}', b"\xff"])
def test_damaged_index_is_refused(tmp_path: Path, content: bytes) -> None:
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CheckpointInvalid, match=INDEX):
        open_checkpoint(tmp_path)


def test_no_tensors_at_all(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {})
    with pytest.raises(CheckpointInvalid, match="holds no tensors"):
        open_checkpoint(tmp_path)


def test_directory_named_like_a_weight_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointInvalid, match="cannot be read"):
        open_checkpoint(tmp_path)


def test_links_into_a_cache_are_followed(tmp_path: Path) -> None:
    """Links into a cache are followed: huggingface_hub's cache consists of them."""
    weights = write_checkpoint(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / file.name)
    assert len(open_checkpoint(snapshot).files[0].header.tensors) == len(weights)


def test_links_out_of_the_directory_are_not_followed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "secret")
    write_checkpoint(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    (tmp_path / "m" / "model.safetensors").symlink_to(tmp_path / "secret" / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"outside .*copy the file there"):
        open_checkpoint(tmp_path / "m")
    (tmp_path / "alias").symlink_to(tmp_path / "secret")
    assert open_checkpoint(tmp_path / "alias").files


def test_layout_is_aligned_disjoint_and_independent_of_the_id(tmp_path: Path) -> None:
    many = {f"layer.{i}.some.quite.long.name.of.a.weight": np.zeros((3, 5), np.float32) for i in range(300)}
    write_checkpoint(tmp_path, {**many, **tensors()}, shards=3)
    checkpoint = open_checkpoint(tmp_path)
    layout = lay_out(checkpoint, "id")
    header = SegmentHeader.model_validate_json(layout.head[:HEADER_BYTES].rstrip(b"\0"))
    index = SegmentIndex.model_validate_json(layout.head[header.index_offset : header.index_offset + header.index_bytes])
    assert header.data_offset == len(layout.head) == layout.places[0].offset
    assert header.total_bytes % PAGE == 0
    assert all(p.offset % PAGE == 0 for p in layout.places)
    ends = [(p.offset, p.offset + p.file.size) for p in layout.places]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert ends[-1][1] <= header.total_bytes
    assert len(index.tensors) == sum(len(f.header.tensors) for f in checkpoint.files)
    assert lay_out(checkpoint, "another, longer id").total_bytes == layout.total_bytes


def revision(directory: Path) -> str:
    return directory_revision(open_checkpoint(directory), (directory / "config.json").read_bytes())


def test_the_revision_follows_the_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    before = revision(tmp_path / "m")
    assert revision(tmp_path / "m") == before
    (tmp_path / "link").symlink_to(tmp_path / "m")
    assert revision(tmp_path / "link") == before
    os.utime(tmp_path / "m" / "model.safetensors", ns=(1, 1))
    touched = revision(tmp_path / "m")
    assert touched != before
    (tmp_path / "m" / "config.json").write_text("{}")
    assert revision(tmp_path / "m") != touched


def test_equal_copies_with_one_mtime_have_different_revisions(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        write_checkpoint(tmp_path / name, tensors(seed=seed))
        os.utime(tmp_path / name / "model.safetensors", ns=(0, 0))
    assert revision(tmp_path / "a") != revision(tmp_path / "b")
