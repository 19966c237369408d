"""Read small files of a model for processes on other hosts.

A gateway that counts tokens is such a process.
"""

from __future__ import annotations

import base64

from shared.contracts.loader import ModelFilePart, ReadModelFile
from shared.errors import NotFound
from weights.sources.sources import Sources


def read_part(sources: Sources, request: ReadModelFile) -> ModelFilePart:
    """Read a part of a file.

    Raises `NotFound` if this host does not have it, `InvalidModel` if `source` is invalid. Blocks.
    """
    path = sources.small_file(request.source, request.name)
    absent = NotFound(f"{request.name} of {request.source} is not on this node")
    if path is None:
        raise absent
    try:
        with path.open("rb") as file:
            total = file.seek(0, 2)
            file.seek(request.offset)
            data = file.read(request.limit)
    except OSError as e:
        raise absent from e
    return ModelFilePart(data=base64.b64encode(data).decode(), total=total)
