"""The part of the Docker Engine API that running an engine needs.

Version 1.41, which Podman also serves.

Reference: docs.docker.com/reference/api/engine, operations ContainerCreate, Start, Logs, Wait,
Inspect, Kill, Delete, List, Top and ImageCreate.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from services.enginehost.http1 import Address, Client, HttpError, HttpRequest, json_request
from shared.errors import EngineFailed

_VERSION = "/v1.41"
_FRAME_HEAD = 8


class NoSuchImage(Exception):
    """The container engine does not have the image."""


class Docker:
    """Client of the container engine's Unix socket.

    Every call raises `EngineFailed` with the API's message.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._client = Client(Address(path=str(socket)))

    async def create(self, name: str, options: Mapping[str, Any]) -> str:
        """Create a container and return its id.

        Args:
            name: Name of the container.
            options: Body of the API's ContainerCreate.
        """
        status, body = await self._ask(json_request(f"{_VERSION}/containers/create?name={quote(name)}", options))
        if status == 404:
            raise NoSuchImage(_message(body))
        return str(_check(status, body, 201)["Id"])

    async def ensure_network(self, name: str) -> None:
        """Create a bridge whose containers cannot reach each other, if it does not exist.

        Podman has no such option; there the bridge does not isolate.
        """
        status, _ = await self._ask(HttpRequest("GET", f"{_VERSION}/networks/{quote(name)}"))
        if status == 200:
            return
        options = {"com.docker.network.bridge.enable_icc": "false"}
        for more in ({"Options": options}, {}):
            made = {"Name": name, "Driver": "bridge", "CheckDuplicate": True, **more}
            status, body = await self._ask(json_request(f"{_VERSION}/networks/create", made))
            if status in (200, 201, 409):  # 409: another host created it first
                return
        _check(status, body, 201)

    async def pull(self, image: str) -> AsyncIterator[dict[str, Any]]:
        """Pull an image and yield the API's progress messages."""
        query = urlencode({"fromImage": image} if ":" in image.rpartition("/")[2] else {"fromImage": image, "tag": "latest"})
        try:
            response = await self._client.send(HttpRequest("POST", f"{_VERSION}/images/create?{query}"))
            try:
                if response.status != 200:
                    raise EngineFailed(f"Image {image} cannot be pulled: {_message(await response.read_all())}")
                rest = b""
                while piece := await response.read():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in filter(None, map(bytes.strip, lines)):
                        message = json.loads(line)
                        if "error" in message:
                            raise EngineFailed(f"Image {image} cannot be pulled: {message['error']}")
                        yield message
            finally:
                response.close()
        except HttpError as e:
            raise self._explain_unreachable(e) from e

    async def start(self, container: str) -> None:
        _check(*await self._ask(HttpRequest("POST", f"{_VERSION}/containers/{container}/start")), 204)

    async def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = _check(*await self._ask(HttpRequest("GET", f"{_VERSION}/containers/{container}/json")), 200)
        return found

    async def wait(self, container: str) -> int:
        """Wait until the container exits, and return its exit status."""
        answer = await self._ask(HttpRequest("POST", f"{_VERSION}/containers/{container}/wait"))
        return int(_check(*answer, 200)["StatusCode"])

    async def kill(self, container: str, signal_name: str) -> bool:
        """Send a signal. False if the container is not running."""
        status, body = await self._ask(HttpRequest("POST", f"{_VERSION}/containers/{container}/kill?signal={signal_name}"))
        if status in (404, 409):
            return False
        _check(status, body, 204)
        return True

    async def remove(self, container: str) -> None:
        """Kill and remove a container. Unknown ids are ignored."""
        status, body = await self._ask(HttpRequest("DELETE", f"{_VERSION}/containers/{container}?force=1&v=1"))
        if status not in (404, 409):
            _check(status, body, 204)

    async def find_labelled(self, *labels: str) -> list[str]:
        """Ids of all containers, running or not, that carry every one of `labels`."""
        filters = quote(json.dumps({"label": list(labels)}))
        found: Any = _check(*await self._ask(HttpRequest("GET", f"{_VERSION}/containers/json?all=1&filters={filters}")), 200)
        return [str(c["Id"]) for c in found]

    async def logs(self, container: str) -> AsyncIterator[bytes]:
        """The container's output from its start to its exit, both streams in order."""
        query = "follow=1&stdout=1&stderr=1"
        response = await self._client.send(HttpRequest("GET", f"{_VERSION}/containers/{container}/logs?{query}"))
        rest = b""
        try:
            while piece := await response.read():
                rest += piece
                at = 0
                while len(rest) - at >= _FRAME_HEAD:
                    begin = at + _FRAME_HEAD
                    end = begin + int.from_bytes(rest[at + 4 : begin], "big")
                    if end > len(rest):
                        break
                    yield rest[begin:end]
                    at = end
                rest = rest[at:]
        finally:
            response.close()

    async def _ask(self, request: HttpRequest) -> tuple[int, bytes]:
        try:
            return await self._client.ask(request)
        except HttpError as e:
            raise self._explain_unreachable(e) from e

    def _explain_unreachable(self, error: HttpError) -> EngineFailed:
        return EngineFailed(f"The container engine at {self._socket} does not answer: {error}; THAW_CONTAINER_SOCKET names it")


def _check(status: int, body: bytes, expected: int) -> Any:
    if status not in (expected, 304):
        raise EngineFailed(f"The container engine answered {status}: {_message(body)}")
    return json.loads(body) if body.strip() else {}


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")
