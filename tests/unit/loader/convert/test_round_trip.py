"""Tensors survive a conversion byte for byte, whatever dtype, shape and strides."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.segment import PAGE
from shared.dtypes import SAFETENSORS_BITS, TORCH_NAMES
from shared.errors import CheckpointInvalid
from tests.support.examples import examples
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.convert.models import named, raw, same, some_weights, stored, write_torch
from weights.convert.job import convert
from weights.formats.checkpoint import open_checkpoint
from weights.formats.converted import ALIGNMENT, INDEX_NAME, PAGE_ALIGNED_FROM
from weights.formats.verify import verify

LEGACY = {
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
}
"""Dtypes with storages in torch's format before 1.6."""
SHAPES = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def a_tensor(draw: st.DrawFn, names: list[str]) -> torch.Tensor:
    """Generate any dtype and bits, dense or a view with gaps or permuted dimensions."""
    dtype: torch.dtype = getattr(torch, draw(st.sampled_from(names)))
    shape = draw(SHAPES if dtype != torch.float4_e2m1fn_x2 else SHAPES.filter(lambda s: len(s) > 0))
    count = math.prod(shape) * dtype.itemsize
    noise = draw(st.binary(min_size=count, max_size=count))
    data = bytes(b & 1 for b in noise) if dtype == torch.bool else noise
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = flat.view(shape)
    order = draw(st.permutations(range(len(shape))))
    viewed, gaps = draw(st.tuples(st.booleans(), st.booleans()))
    if viewed and can_copy(dtype):
        tensor = tensor.permute(order)
        if shape and gaps:
            tensor = tensor[::2]
    return tensor


def can_copy(dtype: torch.dtype) -> bool:
    """Return whether torch can copy it: it can neither pack nor view opaque bits."""
    return not str(dtype).startswith(("torch.bits", "torch.float4"))


@settings(max_examples=examples(60), deadline=None)
@given(st.data(), st.booleans())
def test_any_tensors_of_pytorch(data: st.DataObject, legacy: bool) -> None:
    names = sorted(LEGACY if legacy else TORCH_NAMES.values())
    weights = {f"t{i}": data.draw(a_tensor(names)) for i in range(data.draw(st.integers(1, 4)))}
    weights["tied"] = weights["t0"]
    with tempfile.TemporaryDirectory() as name:
        source, target = write_torch(Path(name) / "m", weights, legacy=legacy), Path(name) / "out"
        convert(source, target, check=True)
        found = stored(target)
    assert same(weights, found)
    assert not found["t0"].data or found["tied"].offset == found["t0"].offset


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(SAFETENSORS_BITS)), SHAPES, st.integers(0, 255)), min_size=1, max_size=5))
def test_any_tensors_of_safetensors(described: list[tuple[str, list[int], int]]) -> None:
    header, content, expected = {}, b"", {}
    for i, (dtype, shape, byte) in enumerate(described):
        bits = math.prod(shape) * SAFETENSORS_BITS[dtype]
        shape = shape if bits % 8 == 0 else [*shape, 8]
        data = bytes([byte]) * (math.prod(shape) * SAFETENSORS_BITS[dtype] // 8)
        header[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
        expected[f"t{i}"] = (dtype, tuple(shape), data)
    head = json.dumps(header).encode()  # of any length: the tensors are not aligned
    with tempfile.TemporaryDirectory() as name:
        file, target = Path(name) / "some.safetensors", Path(name) / "out"
        file.write_bytes(len(head).to_bytes(8, "little") + head + content)
        convert(file, target, check=True)
        assert {n: (t.dtype, t.shape, t.data) for n, t in stored(target).items()} == expected


def test_index_describes_every_tensor(tmp_path: Path) -> None:
    weights = some_weights()
    done = convert(write_torch(tmp_path / "m", weights), tmp_path / "out")
    assert (done.tensors, done.tied, done.ranks) == (len(weights), 1, 1)
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    partition = index["partitions"][0]
    assert (tmp_path / "out" / partition["file"]).stat().st_size == partition["size"] == done.bytes
    assert partition["size"] % PAGE == 0
    assert {t["name"] for t in index["tensors"]} == weights.keys()
    for entry in index["tensors"]:
        tensor = weights[entry["name"]]
        dtype, shape = named(tensor)
        assert (entry["rank"], entry["dtype"], tuple(entry["shape"])) == (0, dtype, shape)
        assert tuple(entry["stride"]) == tensor.contiguous().stride()
        assert entry["size"] == tensor.numel() * tensor.itemsize
        assert entry["sha256"] == hashlib.sha256(raw(tensor)).hexdigest()
        assert entry["offset"] % (PAGE if entry["size"] >= PAGE_ALIGNED_FROM else ALIGNMENT) == 0


def test_tensors_larger_than_a_piece(tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "m", tensors(megabytes=40), shards=3)
    convert(tmp_path / "m", tmp_path / "out", check=True)
    found = stored(tmp_path / "out")
    assert found.keys() == weights.keys()
    assert all(found[name].data == array.tobytes() for name, array in weights.items())


def test_companion_files_are_copied(tmp_path: Path) -> None:
    source = write_torch(tmp_path / "m", some_weights())
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    (source / "training_args.bin").write_bytes(b"a pickle of settings")
    (source / "pytorch_model.bin.index.json").write_text("{}")
    (source / ".cache").mkdir()
    (source / ".cache" / "config.json").write_text("{}")
    convert(source, tmp_path / "out")
    present = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert present == {
        "1_Pooling/config.json",
        "config.json",
        INDEX_NAME,
        "tokenizer.json",
        "tokenizer_config.json",
        "weights-00000-of-00001.thaw",
    }
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("name", ["embed.weight", "layers.0.weight", "scale"])
def test_a_flipped_bit_of_any_tensor_is_found(tmp_path: Path, name: str) -> None:
    target = tmp_path / "out"
    convert(write_torch(tmp_path / "m", some_weights()), target)
    assert verify(target).tensors == len(some_weights())
    path, tensor = open_checkpoint(target).files[0].path, stored(target)[name]
    data = bytearray(path.read_bytes())
    data[tensor.offset + len(tensor.data) - 1] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(CheckpointInvalid, match=f"{path.name}: the bytes of tensor '{name}'"):
        verify(target)


def test_checkpoint_without_hashes_cannot_be_verified(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(CheckpointInvalid, match="only converted checkpoints carry hashes"):
        verify(tmp_path)
