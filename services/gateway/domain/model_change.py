"""Change settings of a registered model: merge them into its spec, and list the differences."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from shared.contracts.admin import SettingChange
from shared.contracts.models import ModelSpec
from shared.errors import InvalidRequest

_FIXED = ("name", "source")


def merge_settings(spec: ModelSpec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `spec` with changes, not validated; null stands for the default.

    Raises:
        InvalidRequest: A setting does not exist, or makes the model another one.
    """
    for name in settings:
        if name in _FIXED:
            raise InvalidRequest(
                f"{name} cannot be changed here. Register another model, or the same one with `thaw models add --replace`",
                param=name,
            )
        if name not in ModelSpec.model_fields:
            raise InvalidRequest(f"There is no setting {name!r} of a model", param=name)
    merged = spec.model_dump(mode="json") | dict(settings)
    return {name: value for name, value in merged.items() if value is not None}


def list_changes(before: ModelSpec, after: ModelSpec) -> tuple[SettingChange, ...]:
    """Return the settings that differ, without values of `env`."""
    old, new = (spec.without_secrets().model_dump(mode="json") for spec in (before, after))
    changed = (name for name in ModelSpec.model_fields if getattr(before, name) != getattr(after, name))
    return tuple(SettingChange(setting=name, before=old[name], after=new[name]) for name in changed)


def version_of(spec: ModelSpec) -> str:
    """Return a digest of all settings, by which a change of an older version is noticed."""
    return hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:16]
