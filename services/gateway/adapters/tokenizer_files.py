"""Tokenizer files of a model, from this host or from a node that has them."""

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
_CHUNK_BYTES = 1024 * 1024
_ENVELOPE_BYTES = 1024
_MAX_FILE_BYTES = 64 * 1024 * 1024
_DEADLINE_MS = 3_000


class TokenizerFiles:
    """Read the tokenizer, chat template and configuration of a model."""

    def __init__(self, mesh: Mesh, nodes: Callable[[], list[str]]) -> None:
        """Ask the live nodes that `nodes` returns."""
        self._mesh = mesh
        self._nodes = nodes

    async def read(self, source: str) -> dict[str, bytes]:
        """Read the files of a source that exist; none if no node has the tokenizer."""
        if source.startswith("/") and (local := await asyncio.to_thread(_read_local, Path(source))):
            return local
        for node in self._nodes():
            try:
                files: dict[str, bytes] = {TOKENIZER: await self._read_file(node, source, TOKENIZER)}
                for name in NAMES[1:]:
                    try:
                        files[name] = await self._read_file(node, source, name)
                    except NotFound:
                        continue
            except ThawError as e:
                log.debug("node did not provide tokenizer files", extra={"node": node, "source": source, "error": e.message})
                continue
            return files
        return {}

    async def _read_file(self, node: str, source: str, name: ModelFile) -> bytes:
        limit = min(_CHUNK_BYTES, (self._mesh.max_body - _ENVELOPE_BYTES) * 3 // 4)
        data, total = b"", 1
        while len(data) < total:
            request = ReadModelFile(source=source, name=name, offset=len(data), limit=limit, deadline_ms=_DEADLINE_MS)
            chunk = await self._mesh.request(subjects.loader_files(node), request, ModelFilePart)
            more, total = base64.b64decode(chunk.data), chunk.total
            if total > _MAX_FILE_BYTES or (not more and total):
                raise ThawError(f"{name} of {source} is too large or incomplete")
            data += more
        return data


def _read_local(directory: Path) -> dict[str, bytes]:
    try:
        found: dict[str, bytes] = {name: (directory / name).read_bytes() for name in NAMES if (directory / name).is_file()}
    except OSError:
        return {}
    return found if TOKENIZER in found else {}
