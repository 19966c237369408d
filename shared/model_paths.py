"""Paths of models on this host."""

from __future__ import annotations

from pathlib import Path

GGUF_SUFFIX = ".gguf"


def resolve_model(path: Path) -> Path:
    """Return the path of a model without links, but with a name that shows the kind of file.

    In the hub's cache the files of a snapshot are links to blobs, which have no suffix. Raises
    what `Path.resolve` raises.
    """
    found = path.resolve()
    return found if path.suffix != GGUF_SUFFIX or found.suffix == GGUF_SUFFIX else path.parent.resolve() / path.name
