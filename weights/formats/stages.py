"""The tensors that a pipeline stage needs, judged by their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shared.contracts.model_info import LayerSizes
from shared.contracts.segment import PAGE
from shared.contracts.stages import LayerRange
from shared.errors import CheckpointInvalid
from weights.formats.execution_order import Position, execution_rank, position_of
from weights.formats.safetensors import TensorEntry


def is_of_stage(name: str, layers: LayerRange, *, is_tied: bool) -> bool:
    """True if a stage with `layers` needs the tensor `name`.

    Args:
        is_tied: The embeddings are the head too: the last stage needs them.
    """
    match position_of(name):
        case Position.LAYER:
            return layers.first <= execution_rank(name)[1] < layers.end
        case Position.FIRST:
            return layers.is_first or (is_tied and layers.is_last)
        case _:
            return layers.is_last


def names_of_stage(names: Sequence[str], layers: LayerRange) -> frozenset[str]:
    """Return those of a checkpoint's tensors that a stage with `layers` needs.

    Raises:
        CheckpointInvalid: The checkpoint does not have `layers.total` layers.
    """
    found = {execution_rank(name)[1] for name in names if position_of(name) is Position.LAYER}
    if found != set(range(layers.total)):
        raise CheckpointInvalid(
            f"The checkpoint has tensors of {len(found)} layers, not of {layers.total}. A pipeline needs a decoder with numbered layers"
        )
    is_tied = not any(position_of(name) is Position.HEAD for name in names)
    return frozenset(name for name in names if is_of_stage(name, layers, is_tied=is_tied))


def layer_sizes(tensors: Sequence[TensorEntry], head_bytes: int) -> LayerSizes | None:
    """Return the sizes of a decoder's parts; None: its layers are not numbered from 0.

    Args:
        tensors: All tensors of a checkpoint.
        head_bytes: Of its segment: header and index.
    """
    sizes: Counter[tuple[Position, int]] = Counter()
    for t in tensors:
        position = position_of(t.name)
        number = execution_rank(t.name)[1] if position is Position.LAYER else 0
        sizes[position, number] += t.nbytes + 2 * PAGE  # a range of the file begins and ends on pages
    layers = {number: nbytes for (position, number), nbytes in sizes.items() if position is Position.LAYER}
    if not layers or layers.keys() != set(range(len(layers))):
        return None
    embedding = sizes[Position.FIRST, 0]
    head = sizes[Position.AFTER, 0] + (sizes[Position.HEAD, 0] or embedding)
    return LayerSizes(
        count=len(layers),
        embedding_bytes=embedding,
        layer_bytes=max(layers.values()) + head_bytes,
        head_bytes=head,
    )
