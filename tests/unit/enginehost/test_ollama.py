"""The import of a GGUF file into Ollama, its downloads, and their errors."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.enginehost.drivers import ollama
from services.enginehost.drivers.ollama import Ollama
from services.enginehost.drivers.port import Launch
from services.enginehost.http1 import Client, HttpRequest
from shared.errors import EngineFailed, InvalidModel
from tests.unit.enginehost.http_servers import says, serving

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
    server = cast(Any, EmptyStore())
    await driver(str(file))._create(cast(Client, server), file, lambda *_: None)
    assert server.parts == [MIB] * 5 + [1]
    assert server.largest_body < 1000


def driver(model: str) -> Ollama:
    return Ollama(cast(Launch, SimpleNamespace(model=model, card=None)))


OK = "HTTP/1.1 200 OK\r\n"
CHUNKED = f"{OK}transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ('HTTP/1.1 500 Error\r\n\r\n{"error": "no space left"}', "answered 500.*no space left"),
        (f'{OK}\r\n{{"error": "file does not exist"}}', "file does not exist"),
        (f'{OK}\r\n{{"status": "pulling"}}\n', "ended before the download did"),
        (f"{OK}\r\n", "ended before the download did"),
        (f"{OK}\r\n[1]\n", "no object"),
        (f"{OK}\r\n\xff\n", "download of m"),
        (f"{OK}\r\n{'x' * 2 * MIB}", "exceeds"),
        (f'{CHUNKED}20\r\n{{"status": "pull', "closed early"),
    ],
)
async def test_faulty_downloads_are_failures_of_the_engine(response: str, message: str) -> None:
    async with serving(says(response.encode("latin-1"))) as client:
        with pytest.raises(EngineFailed, match=message):
            await driver("m")._pull(client, lambda *_: None)


@pytest.mark.parametrize("end", ["", "\n"])
async def test_download_ends_with_its_last_line(end: str) -> None:
    shares: list[float] = []
    body = f'{{"total": 4, "completed": 1}}\n{{"status": "success"}}{end}'
    async with serving(says(f"{OK}\r\n{body}".encode())) as client:
        await driver("m")._pull(client, lambda _, share: shares.append(share))
    assert shares == [0.25]


async def test_broken_connection_during_an_import_is_a_failure_of_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x")

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the first request, and break the connections of the others."""
        if not served:
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        served.append(True)

    served: list[bool] = []
    async with serving(serve) as client:
        with pytest.raises(EngineFailed, match="the model's file"):
            await driver(str(file))._create(client, file, lambda *_: None)
    assert len(served) == 2


async def test_file_that_is_gone_before_its_upload_is_an_invalid_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama, "_digest", lambda _: "sha256:0")
    with pytest.raises(InvalidModel, match="cannot be read"):
        await driver("m")._create(cast(Client, EmptyStore()), tmp_path / "gone.gguf", lambda *_: None)
