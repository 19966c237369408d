"""The order in which a forward pass needs tensors, and loads read them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.unit.loader.checkpoints import write_checkpoint
from weights.formats.checkpoint import open_checkpoint
from weights.formats.execution_order import execution_rank
from weights.formats.segment import lay_out
from weights.transfer.pieces import Piece, Watermark, cut, in_execution_order

LLAMA = [
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.2.input_layernorm.weight",
    "model.layers.10.input_layernorm.weight",
    "model.norm.weight",
    "lm_head.weight",
]
GPT2 = [
    "wte.weight",
    "h.0.ln_1.weight",
    "h.0.attn.c_attn.weight",
    "h.0.ln_2.weight",
    "h.0.mlp.c_fc.weight",
    "h.11.ln_1.weight",
    "ln_f.weight",
]
OPT = [
    "model.decoder.embed_positions.weight",
    "model.decoder.layers.0.self_attn.k_proj.weight",
    "model.decoder.layers.0.fc1.weight",
    "model.decoder.layers.1.self_attn.k_proj.weight",
    "model.decoder.final_layer_norm.weight",
    "lm_head.weight",
]
NEOX = [
    "gpt_neox.embed_in.weight",
    "gpt_neox.layers.3.attention.dense.weight",
    "gpt_neox.final_layer_norm.weight",
    "embed_out.weight",
]


@pytest.mark.parametrize("names", [LLAMA, GPT2, OPT, NEOX], ids=["llama", "gpt2", "opt", "gpt_neox"])
def test_ranks_follow_the_forward_pass(names: list[str]) -> None:
    shuffled = random.Random(1).sample(names, len(names))
    assert sorted(shuffled, key=execution_rank) == names


def test_pieces_are_read_in_execution_order(tmp_path: Path) -> None:
    """A safetensors file has its tensors by name: the head first, and layer 10 before layer 2."""
    names = ["lm_head.weight", "model.embed_tokens.weight", *(f"model.layers.{i}.mlp.up_proj.weight" for i in range(12))]
    write_checkpoint(tmp_path, {name: np.zeros((32, 1024), np.float32) for name in names})
    layout = lay_out(open_checkpoint(tmp_path), "")
    pieces = cut(layout, 64 * 1024)
    ordered = in_execution_order(layout, pieces)
    assert sorted(ordered, key=lambda p: p.index) == list(pieces)
    read = [t.name for p in ordered for t in layout.tensors if t.offset <= p.target and p.target + p.length <= t.offset + t.nbytes]
    assert list(dict.fromkeys(read)) == [*names[1:], names[0]]


class Moving(list[Piece]):
    """Pieces of which one arrives while their number is read."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(pieces)
        self.arrive: Callable[[], None] | None = None

    def __len__(self) -> int:
        arrive, self.arrive = self.arrive, None
        if arrive is not None:
            arrive()
        return super().__len__()


def test_watermark_is_read_while_the_last_piece_arrives() -> None:
    pieces = Moving([Piece(i, 0, 10 * i, 10, 100 + 10 * i) for i in range(2)])
    watermark = Watermark(pieces, 100, 120)
    watermark.record_piece(pieces[0])
    pieces.arrive = lambda: watermark.record_piece(pieces[1])
    assert watermark.loaded in (110, 120)
    assert watermark.loaded == 120
