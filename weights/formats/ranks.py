"""The ranges of tensors that a rank of a tensor-parallel engine takes (ADR 0102).

The table predicts what vLLM's weight loaders take of each tensor: of a column-parallel matrix a
range of its rows, which is one range of the file. Row-parallel matrices are divided by columns, in
thousands of short ranges of the file, so a rank's part has them whole. What the table does not know
is whole too. A wrong entry costs a second load, never a wrong weight: the reader checks each range
that an engine takes (weights/rank_views.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from shared.contracts.segment import PAGE, TensorCut
from shared.contracts.stages import RankOf
from shared.errors import CheckpointInvalid
from weights.formats.checkpoint import Checkpoint
from weights.formats.safetensors import TensorEntry

DIVIDED = frozenset({"gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "qwen2", "qwen3"})
"""Model types whose matrices have the names below, and which vLLM divides in that way."""
VOCABULARY_PADDING = 64
"""vLLM divides the vocabulary after it has rounded it up to a multiple of this
(DEFAULT_VOCAB_PADDING_SIZE in vllm/model_executor/layers/vocab_parallel_embedding.py).
"""
LEAST_BYTES = 16 * PAGE
"""Smaller tensors are whole: each range costs a read, and up to two pages of its neighbours."""
_COLUMNS = re.compile(r"(?:.*\.)?(?:self_attn\.(?P<heads>[qkv])_proj|mlp\.(?:gate|up)_proj)\.(?:weight|bias)")
_FUSED = re.compile(r"gate_up_proj|qkv|query_key_value|c_attn|experts")
_VOCABULARY = re.compile(r"(?:.*\.)?(?:embed_tokens|lm_head)\.weight")


def rows_of_rank(tensors: Iterable[TensorEntry], config: Mapping[str, Any], rank: RankOf) -> dict[str, range]:
    """Return the rows of those tensors that a rank has in part, by name. All others are whole.

    Args:
        tensors: All tensors of a checkpoint.
        config: The content of its config.json.
    """
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, dict) else config
    if text.get("model_type") not in DIVIDED or config.get("quantization_config") is not None:
        return {}
    large = (t for t in tensors if t.shape and t.nbytes >= LEAST_BYTES and t.nbytes % t.shape[0] == 0)
    found = {t.name: _rows(t.name, t.shape[0], text, rank) for t in large}
    return {name: rows for name, rows in found.items() if rows is not None}


def _rows(name: str, count: int, text: Mapping[str, Any], rank: RankOf) -> range | None:
    """Return the rows of a tensor of `count` rows; None: all."""
    if _VOCABULARY.fullmatch(name):
        share, rest = divmod(-(-count // VOCABULARY_PADDING) * VOCABULARY_PADDING, rank.count)
        if rest:  # vLLM refuses it
            return None
        found = range(rank.index * share, min(count, (rank.index + 1) * share))
        return found or None
    match = _COLUMNS.fullmatch(name)
    parts, index = rank.count, rank.index
    if match is None:
        return None
    if match["heads"] is not None:
        heads = text.get("num_attention_heads")
        if match["heads"] != "q":
            heads = text.get("num_key_value_heads") or heads
        if not isinstance(heads, int) or heads < 1:
            return None
        if match["heads"] != "q" and heads < parts and parts % heads == 0:  # ranks share a head
            parts, index = heads, index // (parts // heads)
        if heads % parts:
            return None
    if parts == 1 or count % parts:
        return None
    return range(index * (count // parts), (index + 1) * (count // parts))


def file_of_rank(checkpoint: Checkpoint, rank: RankOf | None) -> Checkpoint:
    """Return one rank's file of a checkpoint that was divided by `thaw convert --tensor-parallel`.

    Raises:
        CheckpointInvalid: It was divided for another number of ranks, or has fused matrices, of
            which a rank has no single range.
    """
    if rank is None or rank.count != checkpoint.ranks:
        raise CheckpointInvalid(
            f"{checkpoint.directory} is divided for {checkpoint.ranks} ranks. Only vLLM with load_format: thaw and stages and "
            f"tensor_parallel_size of {checkpoint.ranks} can load it"
        )
    file = checkpoint.files[rank.index]
    if fused := next((t.name for t in file.header.tensors if t.cut is not None and _FUSED.search(t.name)), None):
        raise CheckpointInvalid(f"{checkpoint.directory}: {fused} is a fused matrix; use the model before its conversion")
    return Checkpoint(checkpoint.directory, (file,))


def cut_tensors(checkpoint: Checkpoint, rows: Mapping[str, range]) -> Checkpoint:
    """Return the checkpoint with the `rows` of these tensors in place of the whole ones."""
    files = []
    for file in checkpoint.files:
        entries = tuple(_cut(t, rows[t.name]) if t.name in rows else t for t in file.header.tensors)
        files.append(replace(file, header=replace(file.header, tensors=entries)))
    return replace(checkpoint, files=tuple(files))


def _cut(t: TensorEntry, rows: range) -> TensorEntry:
    """Return the entry of a range of rows. It has no hash: the tensor's is not that of a range."""
    row_bytes = t.nbytes // t.shape[0]
    return TensorEntry(
        t.name,
        t.dtype,
        (len(rows), *t.shape[1:]),
        t.offset + rows.start * row_bytes,
        len(rows) * row_bytes,
        cut=TensorCut(dim=0, start=rows.start, length=t.shape[0]),
    )
