"""Order tensors by when a forward pass first reads them, judged by their names.

Loads copy in this order, so that computing can begin while later bytes are still on the way
(Torpor, section 4.3). The order is a hint: a wrong guess costs time and never a wrong result,
because every layer waits for its own bytes.
"""

from __future__ import annotations

import re
from enum import IntEnum

Rank = tuple[int, int, int]
"""(stage, layer, step within the layer); smaller is read earlier."""

_LAYER = re.compile(r"\.(\d+)\.")
_EMBEDDINGS = re.compile(r"(^|\.)(embed\w*|wte|wpe|word_embeddings\w*|shared|tok_embeddings|position_embeddings)(\.|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output|score|classifier)(\.|$)")
_DECODER = re.compile(r"(^|\.)decoder\.")
_BEFORE_MLP = re.compile(r"(post_attention|ln_2|pre_feedforward|ffn_norm|final_layer_norm)")
_MLP = re.compile(r"(^|\.)(mlp|ffn|feed_forward|block_sparse_moe|experts|fc1|fc2)(\.|$)")
_ATTENTION = re.compile(r"attn|attention")
_FIRST, _LAYERS, _AFTER, _LAST = range(4)
_STACK = 1 << 20
"""Layers of a decoder follow those of its encoder."""


class Position(IntEnum):
    """The part of a model that a tensor belongs to, in the order of a forward pass."""

    FIRST = _FIRST
    LAYER = _LAYERS
    AFTER = _AFTER
    HEAD = _LAST


def position_of(name: str) -> Position:
    """Return the part of a model that a tensor belongs to, by its name."""
    return Position(execution_rank(name)[0])


def execution_rank(name: str) -> Rank:
    """Return the place of a tensor in a forward pass, by its name."""
    if (layer := _LAYER.search(name)) is not None and "embed" not in name[: layer.start()]:
        stack = _STACK if _DECODER.search(name) and not name.startswith("model.decoder.") else 0
        return _LAYERS, stack + int(layer.group(1)), _step(name[layer.end() :])
    if _HEAD.search(name):
        return _LAST, 0, 0
    return (_FIRST if _EMBEDDINGS.search(name) else _AFTER), 0, 0


def _step(name: str) -> int:
    if _BEFORE_MLP.search(name):
        return 2
    if _MLP.search(name):
        return 3
    return 1 if _ATTENTION.search(name) else 0
