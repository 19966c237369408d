"""GGUF headers, valid and invalid."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.models import ModelSpec
from shared.errors import CheckpointInvalid
from weights.formats.foreign import describe_foreign
from weights.formats.gguf import read_gguf


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, value: int | str) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    return text(key) + struct.pack("<II", 4, value)


def numbers(key: str, *values: int) -> bytes:
    return text(key) + struct.pack(f"<IIQ{len(values)}i", 9, 5, len(values), *values)


def tokens(*names: str) -> bytes:
    return text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(names)) + b"".join(map(text, names))


def gguf(*entries: bytes, shape: tuple[int, ...] = (4, 8), padding: int = 256) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(entries))
    tensor = text("w") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)
    return head + b"".join(entries) + tensor + bytes(padding)


SOUND = (
    entry("general.architecture", "llama"),
    entry("llama.context_length", 2048),
    entry("llama.embedding_length", 64),
    entry("llama.block_count", 2),
    entry("llama.attention.head_count", 4),
    entry("llama.attention.head_count_kv", 2),
    tokens("a", "b"),
    entry("tokenizer.chat_template", "{{ messages }}"),
)


def info_of(path: Path) -> object:
    return describe_foreign(ModelSpec(name="m", engine="llamacpp", source=str(path)))


def test_gguf_header_gives_the_model_information(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf(*SOUND))
    info = describe_foreign(ModelSpec(name="m", engine="llamacpp", source=str(tmp_path)))
    assert info is not None
    assert (info.architecture, info.context_length, info.parameters, info.dtype) == ("llama", 2048, 32, "float32")
    assert info.kv_bytes_per_token == 2 * 2 * (16 + 16) * 2
    assert info.weights_bytes == file.stat().st_size
    assert info.has_chat_template


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "in the middle"),
        (b"GGML" + bytes(100), "does not begin"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 50), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99), "unknown type"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 40), "claims"),
        (gguf(*SOUND, shape=(1 << 40, 1 << 40)), "larger than the file"),
        (gguf(*SOUND)[:200], "in the middle"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQIQIQ", 9, 9, 1, 9, 1, 9, 1), "nested"),
    ],
)
def test_malformed_fields_are_named(tmp_path: Path, data: bytes, words: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointInvalid, match=words) as caught:
        read_gguf(file)
    assert str(file) in str(caught.value)


@given(st.integers(0, len(gguf(*SOUND)) - 1), st.integers(0, 255))
def test_a_flipped_byte_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, place: int, value: int) -> None:
    data = bytearray(gguf(*SOUND))
    data[place] = value
    file = tmp_path_factory.mktemp("gguf") / "m.gguf"
    file.write_bytes(data)
    try:
        found = read_gguf(file)
    except CheckpointInvalid:
        return
    assert found.size == len(data)


def test_sources_of_foreign_engines_are_described(tmp_path: Path) -> None:
    unread = describe_foreign(
        ModelSpec(name="m", engine="ollama", source="engine://qwen3:0.6b", memory=1 << 30, max_model_len=4096)
    )
    assert unread is not None
    assert (unread.weights_bytes, unread.context_length) == (0, 4096)
    assert describe_foreign(ModelSpec(name="m", engine="vllm", source="hf://a/b")) is None
    with pytest.raises(CheckpointInvalid, match="does not exist"):
        info_of(tmp_path / "none")
    with pytest.raises(CheckpointInvalid, match=r"neither a \.gguf file"):
        info_of(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"], "model_type": "new", "quantization_config": {}}')
    with pytest.raises(CheckpointInvalid, match="no weights"):
        info_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    info = describe_foreign(ModelSpec(name="m", engine="vllm", source=str(tmp_path)))
    assert info is not None
    assert (info.architecture, info.weights_bytes) == ("NewForCausalLM", 1000)


def test_kv_cache_of_a_hybrid_model_is_that_of_its_attention_layers(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(*SOUND[:5], numbers("llama.attention.head_count_kv", 0, 2), tokens("a")))
    info = describe_foreign(ModelSpec(name="m", engine="llamacpp", source=str(tmp_path)))
    assert info is not None
    assert info.kv_bytes_per_token == 2 * (16 + 16) * 2


def test_heads_may_differ_by_layer(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(*SOUND[:4], numbers("llama.attention.head_count", 4, 2)))
    info = describe_foreign(ModelSpec(name="m", engine="llamacpp", source=str(tmp_path)))
    assert info is not None
    assert info.kv_bytes_per_token == (4 + 2) * (16 + 16) * 2


def test_memory_of_a_model_in_shards_is_that_of_all_of_them(tmp_path: Path) -> None:
    """llama.cpp gets the first, and loads the others beside it."""
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(gguf(*SOUND, padding=256 * number))
    whole = sum(f.stat().st_size for f in tmp_path.iterdir())
    for source in (tmp_path, tmp_path / "m-00001-of-00002.gguf"):
        info = describe_foreign(ModelSpec(name="m", engine="llamacpp", source=str(source)))
        assert info is not None
        assert (info.weights_bytes, info.files) == (whole, 2)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointInvalid, match="m-00002-of-00002"):
        info_of(tmp_path / "m-00001-of-00002.gguf")


def test_only_the_file_that_llamacpp_takes_of_a_directory_counts(tmp_path: Path) -> None:
    for name in ("m-Q4.gguf", "m-Q8.gguf"):
        (tmp_path / name).write_bytes(gguf(*SOUND))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1}')
    info = describe_foreign(ModelSpec(name="m", engine="llamacpp", source=str(tmp_path)))
    assert info is not None
    assert (info.weights_bytes, info.context_length) == (len(gguf(*SOUND)), 2048)


def test_gguf_file_in_the_hubs_cache_is_a_link_to_a_blob(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(gguf(*SOUND))
    (tmp_path / "m.gguf").symlink_to("blob")
    info = describe_foreign(ModelSpec(name="m", engine="llamacpp", source=str(tmp_path / "m.gguf")))
    assert info is not None
    assert info.source == str(tmp_path / "m.gguf")


@pytest.mark.parametrize("index", [False, True])
def test_weights_in_several_formats_count_once(tmp_path: Path, index: bool) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"], "model_type": "new"}')
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(bytes(1000))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    (tmp_path / "optimizer.pt").write_bytes(bytes(2000))
    if index:
        (tmp_path / "consolidated.safetensors").write_bytes(bytes(1000))
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    info = describe_foreign(ModelSpec(name="m", engine="vllm", source=str(tmp_path)))
    assert info is not None
    assert info.weights_bytes == 1000


def test_files_of_a_training_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"], "model_type": "new"}')
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    (tmp_path / "training_args.bin").write_bytes(bytes(10))
    info = describe_foreign(ModelSpec(name="m", engine="vllm", source=str(tmp_path)))
    assert info is not None
    assert (info.weights_bytes, info.files) == (1000, 1)


def test_weights_that_are_links_to_nothing_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"], "model_type": "new"}')
    (tmp_path / "model.safetensors").symlink_to("gone")
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors cannot be read"):
        describe_foreign(ModelSpec(name="m", engine="vllm", source=str(tmp_path)))
