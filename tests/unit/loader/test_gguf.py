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
