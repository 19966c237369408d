"""Copy the modules of a model as `copy.deepcopy` does, in a fraction of the time.

`copy.deepcopy` takes the state of every module apart by the protocol of pickle, and calls itself
for each attribute. Most attributes are constants or empty dictionaries.
"""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, TypeVar

import torch
from torch import nn

_PROTOCOL = (
    *("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getnewargs__", "__getnewargs_ex__", "__slots__"),
)
"""Methods and attributes by which a class defines its own way to be copied."""
M = TypeVar("M", bound=nn.Module)
_CONSTANTS = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType, torch.dtype, torch.device}
)


def copy_modules(model: M, memo: dict[int, Any]) -> M:
    """Return a deep copy of a model.

    Modules that define how they are copied or pickled are copied by `copy.deepcopy`, and so are
    attributes of other types than constants, lists and dictionaries.

    Args:
        model: The model.
        memo: Copies by the `id` of the original, as for `copy.deepcopy`. Tensors that are in it are
            not copied.
    """
    kinds = {kind for kind in {type(module) for module in model.modules()} if _is_plain(kind)}
    plain = [module for module in model.modules() if type(module) in kinds and id(module) not in memo]
    memo.update((id(module), _make_empty(type(module))) for module in plain)  # attributes may refer to any module
    for module in plain:
        vars(memo[id(module)]).update((name, _copy(value, memo)) for name, value in vars(module).items())
    return copy.deepcopy(model, memo)


def _make_empty(kind: type[M]) -> M:
    return kind.__new__(kind)


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _CONSTANTS:
        return value
    if (known := memo.get(id(value))) is not None:
        return known
    if kind is dict or kind is OrderedDict:
        made = memo[id(value)] = kind()
        if value:
            made.update((_copy(key, memo), _copy(item, memo)) for key, item in value.items())
        return made
    if kind is set and not value:
        return memo.setdefault(id(value), set())
    if kind is list:
        items: list[Any] = []
        memo[id(value)] = items
        items.extend(_copy(item, memo) for item in value)
        return items
    return copy.deepcopy(value, memo)


def _is_plain(kind: type[nn.Module]) -> bool:
    """True if a module's copy is a new object with copies of its attributes."""
    own = [vars(base) for base in kind.__mro__ if base not in (object, nn.Module)]
    return kind not in copyreg.dispatch_table and not any(names.get(name) for names in own for name in _PROTOCOL)
