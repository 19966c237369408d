"""The import of a GGUF file into Ollama."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from services.enginehost.drivers.ollama import Ollama
from services.enginehost.drivers.port import Launch
from services.enginehost.http1 import Client, HttpRequest

MIB = 1 << 20


@dataclass
class EmptyStore:
    """An Ollama without models. It keeps the sizes of the parts of an upload."""

    parts: list[int] = field(default_factory=list)
    largest_body: int = 0

    async def ask(self, request: HttpRequest) -> tuple[int, bytes]:
        self.largest_body = max(self.largest_body, len(request.body))
        if request.stream is not None:
            async for part in request.stream.read():
                self.parts.append(len(part))
            assert sum(self.parts) == request.stream.size_bytes
        return (404 if request.path == "/api/show" or request.method == "HEAD" else 200), b"{}"


async def test_file_is_uploaded_in_pieces(tmp_path: Path) -> None:
    """A model has tens of gigabytes: neither the event loop nor the memory has room for them."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x" * (5 * MIB + 1))
    ollama = Ollama(cast(Launch, SimpleNamespace(model=str(file), card=None)))
    server = cast(Any, EmptyStore())
    await ollama._create(cast(Client, server), file, lambda *_: None)
    assert server.parts == [MIB] * 5 + [1]
    assert server.largest_body < 1000
