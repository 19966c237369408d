"""Converts a Hugging Face Llama directory to GGUF.

Run `PYTHON make_gguf.py DIRECTORY OUT.gguf` in an environment that has `gguf` and numpy. It does
what llama.cpp's convert_hf_to_gguf.py does for this architecture: it maps names, and permutes query
and key rows to the rotary layout.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]  # in the engine's environment only
import numpy as np


def main(directory: Path, out: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_name("demo")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, json.loads((directory / "tokenizer.json").read_text()), config)
    writer.add_chat_template((directory / "chat_template.jinja").read_text())
    for name, array in tensors(directory / "model.safetensors"):
        mapped = mapped_name(name)
        if "q_proj" in name or "k_proj" in name:
            array = permuted(array, heads if "q_proj" in name else kv_heads)
        kind = np.float32 if array.ndim == 1 else np.float16
        writer.add_tensor(mapped, np.ascontiguousarray(array.astype(kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, tokenizer: Any, config: Any) -> None:
    vocabulary = {**tokenizer["model"]["vocab"], **{t["content"]: t["id"] for t in tokenizer["added_tokens"]}}
    tokens = [f"[unused{i}]" for i in range(config["vocab_size"])]
    for token, number in vocabulary.items():
        tokens[number] = token
    special = {t["id"] for t in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)


def tensors(path: Path) -> Any:
    """Yield (name, float32 array) of a safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    for name, reported in header.items():
        if name == "__metadata__":
            continue
        begin, end = reported["data_offsets"]
        raw = data[begin:end]
        if reported["dtype"] == "BF16":
            array = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[reported["dtype"]]).astype(np.float32)
        yield name, array.reshape(reported["shape"])


def mapped_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    _, _, layer, *rest = name.split(".")
    return f"blk.{layer}.{parts['.'.join(rest[:-1])]}.weight"


def permuted(array: Any, heads: int) -> Any:
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
