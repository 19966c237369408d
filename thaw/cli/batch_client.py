"""The gateway's files and batches over HTTP, as `thaw batches` uses them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from thaw.cli.api import Api
from thaw.cli.gateway import error_of
from thaw.cli.paths import replaced_file
from thaw.errors import CommandError

_TIMEOUT = httpx.Timeout(60.0, connect=3.0)
_POLL_S = 0.5
_UNREACHED_S = 60.0
"""A wait for a batch outlasts a gateway that restarts, up to this time."""
ENDED = ("completed", "failed", "expired", "cancelled")
Batch = dict[str, Any]


class _Unreached(CommandError):
    """No response, or one of a gateway that cannot serve at the moment."""


class BatchClient:
    """Client of `/v1/files` and `/v1/batches` with the inference key (THAW_API_KEY).

    Raises:
        CommandError: Any call failed; the message is the gateway's, with a remedy.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._headers = {"authorization": f"Bearer {api.api_key}"} if api.api_key else {}

    def create(self, path: Path, endpoint: str, window: str) -> Batch:
        """Upload a file of requests and create its batch."""
        try:
            with path.open("rb") as file:
                uploaded = self._call("POST", "/v1/files", files={"file": (path.name, file)}, data={"purpose": "batch"})
        except OSError as e:
            raise CommandError(f"{path} cannot be read: {e.strerror}.", "Give a file that you may read.", code="no_file") from e
        asked = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
        try:
            return self._call("POST", "/v1/batches", json=asked)
        except CommandError:
            with contextlib.suppress(CommandError):  # the first error is the one to show
                self._call("DELETE", f"/v1/files/{uploaded['id']}")
            raise

    def list(self, limit: int) -> dict[str, Any]:
        """Return a page of the latest batches."""
        return self._call("GET", "/v1/batches", params={"limit": str(limit)})

    def read(self, batch_id: str) -> Batch:
        return self._call("GET", f"/v1/batches/{quote(batch_id, safe='')}")

    def cancel(self, batch_id: str) -> Batch:
        return self._call("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel")

    def wait(self, batch: Batch, report: Callable[[Batch], None]) -> Batch:
        """Wait until a batch has ended.

        Args:
            batch: The batch as it was last read.
            report: Called with each later state.
        """
        reached_at = time.monotonic()
        while batch["status"] not in ENDED:
            time.sleep(_POLL_S)
            try:
                batch = self.read(batch["id"])
            except _Unreached:
                if time.monotonic() - reached_at > _UNREACHED_S:
                    raise
                continue
            reached_at = time.monotonic()
            report(batch)
        return batch

    def download(self, file_id: str, path: Path) -> None:
        """Write the content of a file to `path`, which is complete or unchanged."""
        try:
            self._download(file_id, path)
        except OSError as e:
            raise CommandError(
                f"{path} cannot be written: {e.strerror}.",
                "`thaw batches show BATCH --output FILE` writes it elsewhere.",
                code="no_output",
            ) from e

    def _download(self, file_id: str, path: Path) -> None:
        content = f"/v1/files/{quote(file_id, safe='')}/content"
        with (
            replaced_file(path) as file,
            self._translated(),
            self._api.client(_TIMEOUT) as client,
            client.stream("GET", content, headers=self._headers) as response,
        ):
            if response.is_error:
                response.read()
                _check(response)
            for part in response.iter_bytes():
                file.write(part)

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with self._translated(), self._api.client(_TIMEOUT) as client:
            response = client.request(method, path, headers=self._headers, **options)
            _check(response)
            try:
                found = response.json()
            except ValueError:
                found = None
            if isinstance(found, dict):
                return found
            raise CommandError(f"The gateway's answer to {path} is not understood.", "Is it of another version of Thaw?")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise errors of the connection as `CommandError`."""
        try:
            yield
        except httpx.ConnectError as e:
            found = self._api.explain_unreachable(e)
            raise _Unreached(found.what, found.remedy, code=found.code) from e
        except httpx.HTTPError as e:
            raise _Unreached(
                f"The gateway at {self._api.url} did not answer ({type(e).__name__}).", "`thaw logs gateway` says why."
            ) from e


def _check(response: httpx.Response) -> None:
    if not response.is_error:
        return
    error = error_of(response.status_code, response.url.path, response.content)
    if response.status_code >= 500:
        raise _Unreached(error.what, error.remedy, code=error.code)
    raise error
