"""Ollama, according to its documentation; not run by Thaw's tests.

Sources: docs/api.md, docs/openai.md, docs/faq.md of ollama/ollama.

Ollama keeps models in its own store: `engine://NAME` is pulled if it is missing, and a GGUF file is
stored under a name made of its digest. Each instance has a server of its own, so that the server's
memory is the instance's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from services.enginehost.drivers.port import PROBE_PROMPT, Command, Driver, OnProgress
from services.enginehost.http1 import BodyStream, Client, HttpError, HttpRequest, Response, call, json_request
from shared.contracts.phases import Phase
from shared.errors import EngineFailed, InvalidModel

_PIECE = 1 << 20
_FOREVER = -1
_MAX_LINE_BYTES = 1 << 20


class Ollama(Driver):
    location_variables = ("THAW_OLLAMA_PROGRAM",)

    health_path = "/api/version"
    _name = ""

    @property
    def served_name(self) -> str:
        return self._name or self.launch.model

    def command(self) -> Command:
        return Command((self.launch.settings.ollama_program, "serve"))

    def arguments(self) -> tuple[str, ...]:
        return ("serve",)

    def environment(self) -> dict[str, str]:
        spec = self.card.spec
        found = {
            "OLLAMA_HOST": f"{self.launch.host}:{self.launch.port}",
            "OLLAMA_KEEP_ALIVE": str(_FOREVER),
            "OLLAMA_MAX_LOADED_MODELS": "1",
            "OLLAMA_NUM_PARALLEL": str(spec.max_concurrency),
            "OLLAMA_CONTEXT_LENGTH": str(self.card.context_length),
        }
        if self.launch.settings.ollama_models is not None:
            found["OLLAMA_MODELS"] = str(self.launch.settings.ollama_models)
        return found | {k: str(v) for k, v in spec.engine_args.items() if k.startswith("OLLAMA_")}

    def headers(self) -> dict[str, str]:
        """No headers: Ollama has no API keys."""
        return {}

    async def prepare(self, client: Client, on_progress: OnProgress) -> None:
        """Load the model into Ollama's store, then into memory."""
        if self.launch.model.endswith(".gguf"):
            await self._create(client, Path(self.launch.model), on_progress)
        elif not await self._has(client):
            await self._pull(client, on_progress)
        await self._load(client)

    async def _has(self, client: Client) -> bool:
        try:
            status, _ = await client.ask(json_request("/api/show", {"model": self.served_name}))
        except HttpError as e:
            raise EngineFailed(f"Asking Ollama for {self.served_name}: {e}") from e
        return status == 200

    async def _pull(self, client: Client, on_progress: OnProgress) -> None:
        what = f"Ollama's download of {self.served_name}"
        try:
            response = await client.send(json_request("/api/pull", {"model": self.served_name}))
            try:
                if response.status != 200:
                    body = await response.read_all(_MAX_LINE_BYTES)
                    raise EngineFailed(f"{what}: the engine answered {response.status}: {body[:300].decode(errors='replace')}")
                is_complete = False
                async for line in _read_lines(response):
                    is_complete = _report_pull(json.loads(line), self.served_name, on_progress)
            finally:
                response.close()
        except (HttpError, ValueError) as e:
            raise EngineFailed(f"{what}: {e}") from e
        if not is_complete:
            raise EngineFailed(f"{what}: the response ended before the download did")

    async def _create(self, client: Client, path: Path, on_progress: OnProgress) -> None:
        """Upload the file in one request, a piece at a time.

        A local server reads it as fast as the disk does.
        """
        on_progress(Phase.FETCH, 0.0)
        digest = await asyncio.to_thread(_digest, path)
        self._name = f"thaw-{digest.removeprefix('sha256:')[:16]}"
        if await self._has(client):
            return
        if not await self._has_file(client, digest):
            upload = HttpRequest("POST", f"/api/blobs/{digest}", stream=BodyStream(_size_of(path), lambda: _read_pieces(path)))
            await call(client, upload, "giving Ollama the model's file")
        created = json_request("/api/create", {"model": self._name, "files": {path.name: digest}, "stream": False})
        await call(client, created, "making an Ollama model of the file")
        on_progress(Phase.FETCH, 1.0)

    async def _has_file(self, client: Client, digest: str) -> bool:
        try:
            status, _ = await client.ask(HttpRequest("HEAD", f"/api/blobs/{digest}"))
        except HttpError as e:
            raise EngineFailed(f"Asking Ollama for the model's file: {e}") from e
        return status == 200

    async def _load(self, client: Client) -> None:
        """Load the model into memory.

        An embedding model has no empty request, so it embeds one word.
        """
        asked = {"model": self.served_name, "keep_alive": _FOREVER}
        if self.card.info.task == "embed":
            request = json_request("/api/embed", {**asked, "input": PROBE_PROMPT})
        else:
            request = json_request("/api/generate", {**asked, "stream": False})
        await call(client, request, "having Ollama load the model")

    async def _unload(self, client: Client) -> None:
        asked = {"model": self.served_name, "keep_alive": 0, "stream": False}
        await call(client, json_request("/api/generate", asked), "having Ollama unload the model")

    @property
    def sleep_levels(self) -> tuple[int, ...]:
        return (2,)

    async def sleep(self, client: Client, level: int) -> None:
        if level != 2:
            await super().sleep(client, level)
        await self._unload(client)

    async def wake(self, client: Client, level: int) -> None:
        await self._load(client)


def _report_pull(message: object, name: str, on_progress: OnProgress) -> bool:
    """Report the progress of a download. True if it is complete."""
    if not isinstance(message, dict):
        raise EngineFailed(f"Ollama's download of {name}: a line of the response is no object")
    if "error" in message:
        raise EngineFailed(f"Ollama failed to download {name}: {message['error']}")
    total, completed = message.get("total"), message.get("completed")
    if isinstance(total, int) and isinstance(completed, int) and total:
        on_progress(Phase.FETCH, completed / total)
    return message.get("status") == "success"


async def _read_lines(response: Response) -> AsyncIterator[bytes]:
    """Yield the lines of a response. The last one needs no line break."""
    rest = b""
    while piece := await response.read():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise HttpError(f"a line of the response exceeds {_MAX_LINE_BYTES} bytes")
        for line in filter(None, lines):
            yield line
    if rest:
        yield rest


async def _read_pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as e:
        raise InvalidModel(f"{path} cannot be read: {e.strerror}") from e


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                found.update(piece)
    except OSError as e:
        raise InvalidModel(f"{path} cannot be read: {e.strerror}") from e
    return f"sha256:{found.hexdigest()}"
