"""Paths of models on this host."""

from __future__ import annotations

import re
from pathlib import Path

GGUF_SUFFIX = ".gguf"
_GGUF_SHARD = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>(?!00000)\d{5})\.gguf")


def resolve_model(path: Path) -> Path:
    """Return the path of a model without links, but with a name that shows the kind of file.

    In the hub's cache the files of a snapshot are links to blobs, which have no suffix. Raises
    what `Path.resolve` raises.
    """
    found = path.resolve()
    return found if path.suffix != GGUF_SUFFIX or found.suffix == GGUF_SUFFIX else path.parent.resolve() / path.name


def shards_of(file: Path) -> list[Path]:
    """Return all files of a GGUF model, by the name of one of them."""
    found = _GGUF_SHARD.fullmatch(file.name)
    if found is None:
        return [file]
    count = found["count"]
    return [file.with_name(f"{found['name']}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]
