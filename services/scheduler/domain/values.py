"""Frozen values, as mypy sees them; when run, nothing guards their fields.

`dataclasses.dataclass(frozen=True)` sets each field of a new object in a roundabout way that costs several times what setting costs, and a
decision makes some hundred values. `value` is the same decorator without the guard, `replace` the same function in half the time: mypy, which
takes them for those of `dataclasses`, refuses to assign to a field all the same.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from shared.contracts.base import Frozen

M = TypeVar("M", bound=Frozen)

if TYPE_CHECKING:
    from dataclasses import dataclass as value
    from dataclasses import replace as replace
else:
    from dataclasses import dataclass, fields
    from operator import attrgetter

    def value(*, frozen, slots):
        return dataclass(slots=slots, unsafe_hash=frozen)

    def replace(old, /, **changes):
        kind = type(old)
        new = kind(*_fields_of(kind)(old))
        for name, changed in changes.items():
            setattr(new, name, changed)
        return new

    @cache
    def _fields_of(kind):
        return attrgetter(*[f.name for f in fields(kind)])


def unchecked(kind: type[M], values: dict[str, Any]) -> M:
    """A contract's value made of `values`, every field's, that have its types already: nothing is checked, converted or copied.

    As pydantic's `model_construct`, which takes longer than checking does. For records of which a decision makes many."""
    made = object.__new__(kind)
    _set(made, "__dict__", values)
    _set(made, "__pydantic_fields_set__", _names_of(kind))
    _set(made, "__pydantic_extra__", None)
    _set(made, "__pydantic_private__", None)
    return made


_set = object.__setattr__


@cache
def _names_of(kind: type[Frozen]) -> set[str]:
    return set(kind.model_fields)


__all__ = ["replace", "unchecked", "value"]
