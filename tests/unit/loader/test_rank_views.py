"""Views of tensors of which a rank has a range, used as vLLM's weight loaders use tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shared.contracts.segment import TensorCut
from weights.rank_views import RankView, Taken, view_of

WHOLE = torch.arange(8 * 6, dtype=torch.float32).view(8, 6)
ROWS = TensorCut(dim=0, start=4, length=8)


def refuse() -> torch.Tensor:
    raise AssertionError("the whole tensor was read")


def view(taken: Taken, whole: Callable[[], torch.Tensor] = refuse) -> RankView:
    """Return the view of a rank that has the second half of the rows."""
    return view_of(WHOLE[4:].clone(), ROWS, whole, taken)


def test_view_has_the_shape_of_the_whole_tensor_and_reads_nothing_for_it() -> None:
    taken = Taken()
    found = view(taken)
    assert (tuple(found.shape), found.dim(), found.size(1), found.dtype) == ((8, 6), 2, 6, torch.float32)
    assert (found.numel(), found.nbytes, len(found)) == (48, 192, 8)
    assert taken == Taken()


def test_only_the_range_of_the_rank_is_read() -> None:
    taken, parameter = Taken(), torch.nn.Parameter(torch.zeros(4, 6))
    parameter.data.copy_(view(taken).narrow(0, 4, 4))
    assert parameter.equal(WHOLE[4:])
    assert (taken.nbytes, taken.whole_tensors) == (WHOLE[4:].nbytes, 0)


def test_ranges_of_ranges_are_read_once() -> None:
    taken, out = Taken(), torch.zeros(2, 3)
    out.copy_(view(taken).narrow(0, 4, 4).narrow(1, 3, 3).narrow(0, 1, 2))
    assert out.equal(WHOLE[5:7, 3:])
    assert taken.nbytes == out.nbytes


def test_columns_of_a_whole_tensor_are_read_alone() -> None:
    """As of a row-parallel matrix."""
    taken, out = Taken(), torch.zeros(8, 3)
    out.copy_(view_of(WHOLE, None, refuse, taken).narrow(-1, 3, 3))
    assert out.equal(WHOLE[:, 3:])
    assert taken.nbytes == WHOLE.nbytes // 2


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda v: v.narrow(0, 2, 4) + 0, WHOLE[2:6]),
        (lambda v: v.clone(), WHOLE),
        (lambda v: v[3], WHOLE[3]),
        (lambda v: v.t().contiguous(), WHOLE.t()),
        (lambda v: torch.cat([v.narrow(0, 0, 1), v.narrow(0, 7, 1)]), WHOLE[[0, 7]]),
        (lambda v: v.narrow(1, 0, 2).to(torch.float64), WHOLE[:, :2].double()),
    ],
)
def test_engine_that_divides_otherwise_gets_the_elements_of_the_whole_tensor(
    use: Callable[[torch.Tensor], torch.Tensor], expected: torch.Tensor
) -> None:
    taken = Taken()
    found = use(view(taken, lambda: WHOLE))
    assert type(found) is torch.Tensor
    assert found.equal(expected)
    assert taken.whole_tensors >= 1


def test_parameters_with_functions_of_their_own_take_views() -> None:
    """vLLM's parameters are such a class."""

    class Parameter(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    taken, parameter = Taken(), Parameter(torch.zeros(4, 6), requires_grad=False)
    parameter.copy_(view(taken).narrow(0, 4, 4))
    parameter[:2].data.copy_(view(taken).narrow(0, 6, 2))
    assert parameter.data.equal(torch.cat([WHOLE[6:], WHOLE[6:]]))
    assert taken.whole_tensors == 0


@pytest.mark.parametrize(("start", "length"), [(-9, 1), (5, 4), (0, 9)])
def test_ranges_outside_are_refused(start: int, length: int) -> None:
    with pytest.raises(IndexError):
        view(Taken()).narrow(0, start, length)
