"""Credentials in thaw.yaml: the text itself, or variables of the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

from thaw.config.faults import Path

UNSET = "names a variable that is not set, or is empty; set it, or give the key itself"
_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|(\w+))", re.ASCII)


def names_of(text: str) -> set[str]:
    """Return the names of the variables that `text` has as `$NAME` or `${NAME}`."""
    return {braced or bare for braced, bare in _VARIABLE.findall(text)}


def expand(text: str) -> str | None:
    """Return `text` with `$NAME` and `${NAME}` replaced from the environment.

    None if one of them is not set or is empty: each reader of the file would know the key.
    """
    if not all(os.environ.get(name) for name in names_of(text)):
        return None
    return _VARIABLE.sub(lambda found: os.environ[found[1] or found[2]], text)


def expand_reference(text: str) -> str | None:
    """Expand `text` if it has `${NAME}` or is `$NAME`. Another `$` is plain text."""
    return expand(text) if _is_reference(text) else text


def _is_reference(text: str) -> bool:
    return "${" in text or _VARIABLE.fullmatch(text) is not None


def names_in_mesh(mesh: dict[str, Any]) -> set[str]:
    """Return the names of the variables in the keys of the section `mesh`."""
    keys = mesh.get("api_keys")
    texts = [mesh.get("admin_key"), *(keys if isinstance(keys, list) else ())]
    return {name for text in texts if isinstance(text, str) and _is_reference(text) for name in names_of(text)}


def expand_mesh(mesh: dict[str, Any], report: Callable[[Path, str], None]) -> dict[str, Any]:
    """Return the section `mesh` with the variables in its keys replaced.

    Args:
        report: Called with the path of each key whose variable is not set; the key is left out.
    """
    expanded = dict(mesh)
    if isinstance(mesh.get("admin_key"), str):
        expanded["admin_key"] = expand_reference(mesh["admin_key"])
        if expanded["admin_key"] is None:
            report(("mesh", "admin_key"), UNSET)
    if isinstance(mesh.get("api_keys"), list):
        found = [expand_reference(key) if isinstance(key, str) else key for key in mesh["api_keys"]]
        for i, key in enumerate(found):
            if key is None and mesh["api_keys"][i] is not None:
                report(("mesh", "api_keys", i), UNSET)
        expanded["api_keys"] = [key for key, given in zip(found, mesh["api_keys"], strict=True) if key is not None or given is None]
    return expanded


def expiry_of(given: date) -> int:
    """Return a YAML time, or the local beginning of a date, in Unix seconds."""
    at = given if isinstance(given, datetime) else datetime.combine(given, datetime.min.time())
    return int(at.astimezone().timestamp())
