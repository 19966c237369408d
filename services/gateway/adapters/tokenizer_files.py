"""The files that tell how many tokens a prompt has: from this host, or through the mesh from whichever node has them."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from shared.contracts import subjects
from shared.contracts.loader import ModelFile, ModelFilePart, ReadModelFile
from shared.errors import NotFound, ThawError
from shared.messaging import Mesh

log = logging.getLogger(__name__)
NAMES: tuple[ModelFile, ...] = get_args(ModelFile)
TOKENIZER: ModelFile = "tokenizer.json"
_PART_BYTES = 1024 * 1024
_ENVELOPE_BYTES = 1024
_LARGEST_BYTES = 64 * 1024 * 1024
_DEADLINE_MS = 3_000


class ModelFiles:
    """`nodes` names those that are alive."""

    def __init__(self, mesh: Mesh, nodes: Callable[[], list[str]]) -> None:
        self._mesh = mesh
        self._nodes = nodes

    async def read(self, source: str) -> dict[str, bytes]:
        """The files that there are; empty if nobody has the tokenizer."""
        if source.startswith("/") and (here := await asyncio.to_thread(_read_here, Path(source))):
            return here
        for node in self._nodes():
            try:
                files: dict[str, bytes] = {TOKENIZER: await self._file(node, source, TOKENIZER)}
                for name in NAMES[1:]:
                    try:
                        files[name] = await self._file(node, source, name)
                    except NotFound:
                        continue
            except ThawError as e:
                log.debug("a node does not give a model's files", extra={"node": node, "source": source, "error": e.message})
                continue
            return files
        return {}

    async def _file(self, node: str, source: str, name: ModelFile) -> bytes:
        limit = min(_PART_BYTES, (self._mesh.max_body - _ENVELOPE_BYTES) * 3 // 4)
        data, total = b"", 1
        while len(data) < total:
            request = ReadModelFile(source=source, name=name, offset=len(data), limit=limit, deadline_ms=_DEADLINE_MS)
            part = await self._mesh.request(subjects.loader_files(node), request, ModelFilePart)
            more, total = base64.b64decode(part.data), part.total
            if total > _LARGEST_BYTES or (not more and total):
                raise ThawError(f"{name} of {source} cannot be read whole")
            data += more
        return data


def _read_here(directory: Path) -> dict[str, bytes]:
    try:
        found: dict[str, bytes] = {name: (directory / name).read_bytes() for name in NAMES if (directory / name).is_file()}
    except OSError:
        return {}
    return found if TOKENIZER in found else {}
