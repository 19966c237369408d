"""Keys and values of a sequence as the bytes of pieces, for transfers between engines.

For each layer a piece has [2, heads, tokens, head size]. All functions run on the computing thread.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from services.engine.domain.kv_pieces import Piece
from services.engine.generation.kv_cache import SequenceKV
from shared.contracts.kv_transfer import KvLayer, KvLayout


def layout_of(state: SequenceKV) -> KvLayout:
    """Describe how a sequence with at least one token is stored."""
    held = state.layers
    (dtype,) = {t.dtype for t in held.values()}
    layers = tuple(KvLayer(layer=i, heads=t.shape[1], head_size=t.shape[3]) for i, t in held.items())
    name, order = str(dtype).removeprefix("torch."), sys.byteorder
    return KvLayout(dtype=name, itemsize=dtype.itemsize, byte_order=order, layers=layers)


@torch.inference_mode()
def read_piece(state: SequenceKV, piece: Piece, layout: KvLayout) -> memoryview:
    """Return a copy of a piece, which the sequence has."""
    data = bytearray(piece.size_bytes(layout))
    at = 0
    for layer in layout.layers[piece.layers]:
        copied: Any = state.copy_range(layer.layer, piece.start, piece.end).view(torch.uint8).reshape(-1).numpy()
        data[at : at + copied.nbytes] = memoryview(copied)
        at += copied.nbytes
    return memoryview(data)


@torch.inference_mode()
def write_piece(state: SequenceKV, piece: Piece, layout: KvLayout, data: bytearray, device: torch.device) -> None:
    """Copy the bytes of a piece into a sequence."""
    at, tokens, dtype = 0, piece.end - piece.start, getattr(torch, layout.dtype)
    for layer, token_bytes in zip(layout.layers[piece.layers], layout.layer_bytes[piece.layers], strict=True):
        values = torch.frombuffer(data, dtype=dtype, offset=at, count=token_bytes * tokens // layout.itemsize)
        values = values.view(2, layer.heads, tokens, layer.head_size).to(device)
        state.append(layer.layer, piece.start, values[:1], values[1:])
        at += token_bytes * tokens
