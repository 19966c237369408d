"""Tensors of which a tensor-parallel rank has a range, for engines that expect whole ones.

vLLM's weight loaders get a whole tensor and narrow it to the range of their rank. A `RankView` has
the shape of the whole tensor and remembers how it is narrowed. Its elements are read when something
else is done with it: from the range that the loader has brought, or, if the engine wants others,
from the whole tensor. So an engine whose division differs from the loader's prediction still gets
the right elements.

Import this module only where torch is wanted: it takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from shared.contracts.segment import SegmentTensor, TensorCut
from shared.contracts.stages import RankOf
from weights.binding import bind
from weights.client import Weights, attach


@dataclass
class Taken:
    """Statistics of the ranges that an engine has read.

    Attributes:
        nbytes: Bytes of the ranges that were read.
        brought_bytes: Bytes that the loader has brought into host memory for it.
        whole_tensors: Reads of a whole tensor because the loader's range did not suffice.
    """

    nbytes: int = 0
    brought_bytes: int = 0
    whole_tensors: int = 0


@dataclass(frozen=True)
class _Window:
    """A part of a tensor: for each dimension, its first index and its length."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def narrow(self, dim: int, start: int, length: int) -> _Window:
        dim %= len(self.lengths)
        size = self.lengths[dim]
        start = start + size if start < 0 else start
        if not 0 <= start <= start + length <= size:
            raise IndexError(f"a range of {length} from {start} is outside a dimension of {size}")
        starts, lengths = list(self.starts), list(self.lengths)
        starts[dim], lengths[dim] = starts[dim] + start, length
        return replace(self, starts=tuple(starts), lengths=tuple(lengths))

    def apply(self, tensor: torch.Tensor, cut: TensorCut | None = None) -> torch.Tensor:
        """Return the part of `tensor`, which has the range `cut` of the whole one."""
        for dim, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            first = start - cut.start if cut is not None and cut.dim == dim else start
            if (first, length) != (0, tensor.shape[dim]):
                tensor = tensor.narrow(dim, first, length)
        return tensor

    def is_in(self, tensor: torch.Tensor, cut: TensorCut | None) -> bool:
        if cut is None:
            return True
        first = self.starts[cut.dim] - cut.start
        return first >= 0 and first + self.lengths[cut.dim] <= tensor.shape[cut.dim]


@dataclass(frozen=True)
class _Origin:
    """The place of a view's elements."""

    tensor: torch.Tensor
    cut: TensorCut | None
    whole: Callable[[], torch.Tensor]
    taken: Taken

    def read(self, window: _Window) -> torch.Tensor:
        if window.is_in(self.tensor, self.cut):
            found = window.apply(self.tensor, self.cut)
        else:
            found = window.apply(self.whole())
            self.taken.whole_tensors += 1
        self.taken.nbytes += found.nbytes
        return found


class RankView(torch.Tensor):
    """A tensor of the whole shape whose elements are read late."""

    _origin: _Origin
    _window: _Window

    @staticmethod
    def __new__(cls: type[Self], origin: _Origin, window: _Window) -> Self:
        found: Self = torch.Tensor._make_wrapper_subclass(
            cls, window.lengths, dtype=origin.tensor.dtype, device=origin.tensor.device
        )
        found._origin, found._window = origin, window
        return found

    def __init__(self, origin: _Origin, window: _Window) -> None:
        """Torch sets the attributes in `__new__`."""

    def read(self) -> torch.Tensor:
        """Return the elements."""
        return self._origin.read(self._window)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NARROW and isinstance(args[0], RankView):
            return args[0]._narrow(*args[1:], **kwargs)
        if func in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*tree_map(_read, args), **tree_map(_read, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its disabled form, a function
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Read the elements for operations that reach torch past `__torch_function__`."""
        return func(*tree_map(_read, args), **tree_map(_read, kwargs or {}))

    def _narrow(self, dim: int, start: int | torch.Tensor, length: int) -> RankView:
        return RankView(self._origin, self._window.narrow(dim, int(start), length))


def view_of(tensor: torch.Tensor, cut: TensorCut | None, whole: Callable[[], torch.Tensor], taken: Taken) -> RankView:
    """Return a view of the whole tensor.

    Args:
        tensor: What this process has of it.
        cut: The range of the whole tensor that this is; None: all of it.
        whole: Returns the whole tensor, if the engine wants more than that range.
        taken: Counts what is read.
    """
    lengths = list(tensor.shape)
    if cut is not None:
        lengths[cut.dim] = cut.length
    return RankView(_Origin(tensor, cut, whole, taken), _Window((0,) * len(lengths), tuple(lengths)))


@contextmanager
def rank_tensors(
    source: str, socket: str, rank: RankOf, taken: Taken, *, is_part: bool, timeout: float | None = None
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield a view of each tensor of a model for one rank, as soon as its bytes are complete.

    Args:
        source: The model's source as registered.
        socket: Of the node's loader.
        rank: The rank.
        taken: Counts what is read.
        is_part: The loader brings the rank's part only; otherwise all weights, for all ranks of the
            node.
        timeout: Longest silence of the loader in seconds.

    Raises:
        ThawError: The loader's error.
    """
    with ExitStack() as stack:

        def open_whole() -> Weights:
            found = stack.enter_context(attach(socket, source=source, timeout=timeout))
            taken.brought_bytes += found.total_bytes
            return found

        held = stack.enter_context(attach(socket, source=source, rank=rank if is_part else None, timeout=timeout))
        taken.brought_bytes += held.total_bytes
        whole = _WholeWeights(open_whole)
        yield ((e.name, view_of(_bind(e, data), e.cut, partial(whole.read, e.name), taken)) for e, data in held.tensors())


class _WholeWeights:
    """All weights, which are attached only if some tensor is wanted whole."""

    def __init__(self, attach_all: Callable[[], Weights]) -> None:
        self._attach_all = attach_all
        self._held: Weights | None = None
        self._tensors: dict[str, SegmentTensor] = {}

    def read(self, name: str) -> torch.Tensor:
        if self._held is None:
            self._held = self._attach_all()
            self._tensors = {t.name: t for t in self._held.index.tensors}
        found = self._tensors[name]
        self._held.wait_until(found.offset + found.nbytes)
        return _bind(found, memoryview(self._held.buffer)[found.offset : found.offset + found.nbytes])


def _bind(tensor: SegmentTensor, data: memoryview) -> torch.Tensor:
    return bind(tensor.name, tensor.dtype, tensor.shape, data, tensor.offset)


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, RankView) else value


_NARROW = frozenset({torch.narrow, torch.Tensor.narrow})
_OF_SHAPE = frozenset(
    {
        torch.Tensor.dim,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.numel,
        torch.Tensor.size,
        torch.Tensor.__len__,
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("device", "dtype", "is_meta", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape")
        ),
    }
)
"""Operations that need the shape and the type only."""
