"""Call a gateway over HTTP with the standard library.

Importing httpx takes longer than most commands.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

from thaw.errors import CommandError, NotRunning
from thaw.launcher.home import Home, read_json

_CONNECT_S = 3.0
_ANSWER_S = 15.0
_SLACK_S = 10.0
_TAKEOVER_S = 6.0
_PAUSE_S = 0.2
_UNREACHED = "unreachable"
_REMEDIES = {
    "model_not_found": "`thaw models add NAME SOURCE` registers one.",
    "invalid_api_key": "Set THAW_API_KEY for `thaw chat`, `thaw batches` and the demo (`thaw keys add NAME` makes a key), else THAW_ADMIN_KEY.",
    "unreachable": "`thaw doctor` shows which part is missing; it may be starting again.",
    "unavailable": "Try again; `thaw ps` and `thaw doctor` show whether a part of the mesh is missing.",
    "insufficient_memory": "`thaw explain MODEL` shows what was considered for a registered model.",
    "checkpoint_invalid": "Repair the model's files or download them again; if it was loaded before, register it again too.",
    "unsupported_architecture": "The builtin engine runs what transformers' auto classes run.",
    "engine_killed": "Something else on its node killed the engine; `thaw ps --json` names the instance.",
    "engine_failed": "`thaw ps --json` names the instance that failed; `thaw logs INSTANCE` shows its log.",
    "queue_full": "Try again later, or raise queue.max_waiting of the model.",
    "not_found": "",
}


@dataclass(frozen=True)
class Answer:
    """One response."""

    status: int
    path: str
    body: bytes

    @property
    def is_error(self) -> bool:
        return self.status >= 400

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Gateway:
    """A gateway's admin API, as JSON.

    Args:
        url: http:// or https://, host and port.
        admin_key: Key of the admin API.
        api_key: Key for inference.
        own: True if the gateway is of this machine's mesh. Its certificate, if it has one, is then
            not checked: it names the outside.
    """

    def __init__(self, url: str, admin_key: str | None = None, api_key: str | None = None, *, own: bool = False) -> None:
        self.url = url.rstrip("/")
        self._admin_key = admin_key
        self.api_key = api_key
        self.own = own

    @classmethod
    def find(cls, home: Home | None = None) -> Self:
        """The gateway that THAW_URL names, or that of the mesh under THAW_HOME."""
        key = _variable("THAW_ADMIN_KEY") or _secret("thaw_admin_key")
        if url := os.environ.get("THAW_URL"):
            if not _is_address(url):
                raise CommandError(f"THAW_URL is {url!r}.", "Set it to http://HOST:PORT of a gateway.", code="bad_setting")
            return cls(url, key, _variable("THAW_API_KEY"))
        local = cls.from_home(home or Home.from_environment())
        return cls(local.url, key or local._admin_key, local.api_key, own=True)

    @classmethod
    def from_home(cls, home: Home) -> Self:
        """Return the gateway of the mesh under `home`.

        THAW_URL and THAW_ADMIN_KEY are ignored, because they may be another mesh's.
        """
        endpoints = read_json(home.endpoints_file)
        if endpoints is None:
            raise NotRunning(home.root)
        return cls(str(endpoints["url"]), str(endpoints["admin_key"]), _variable("THAW_API_KEY"), own=True)

    def _make_ssl_context(self) -> ssl.SSLContext | bool:
        if self.own or not self.url.startswith("https:"):
            return False
        named = any(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
        return ssl.create_default_context() if named else True

    def request(self, method: str, path: str, content: str | None = None, *, timeout: float | None = None, **params: str) -> Any:
        """Return the JSON of one call.

        While no scheduler leads (one was killed, the next takes over within 3 s) the call has
        reached none, so it is repeated.

        Args:
            method: HTTP method.
            path: Path, which may have a query.
            content: JSON to send.
            timeout: Seconds that the mesh may work on it.
            params: Query parameters.

        Raises:
            CommandError: The call failed.
        """
        deadline = time.monotonic() + _TAKEOVER_S
        while True:
            try:
                return self._request(method, path, content, timeout, params)
            except CommandError as e:
                if e.code != _UNREACHED or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    def _request(self, method: str, path: str, content: str | None, timeout: float | None, params: dict[str, str]) -> Any:
        query = f"{'&' if '?' in path else '?'}{urlencode(params)}" if params else ""
        try:
            answer = self.send(method, path + query, content, timeout + _SLACK_S if timeout else _ANSWER_S)
        except (http.client.HTTPException, OSError, ValueError) as e:
            raise CommandError(
                f"The gateway at {self.url} did not answer ({type(e).__name__}: {e}).", "`thaw logs gateway` says why."
            ) from e
        if answer.is_error:
            raise error_of(answer.status, answer.path, answer.body)
        try:
            return json.loads(answer.body) if answer.body else {}
        except ValueError as e:
            raise CommandError(
                f"What answers at {self.url} is no gateway of Thaw.", "Set THAW_URL to one.", code="no_gateway"
            ) from e

    def send(self, method: str, path: str, content: str | None, timeout: float) -> Answer:
        """Make one call.

        A mesh is called without the environment's proxies, but with its authorities
        (SSL_CERT_FILE).

        Raises:
            CommandError: No connection.
            OSError: No answer within `timeout` seconds.
        """
        headers = {"authorization": f"Bearer {self._admin_key}"} if self._admin_key else {}
        if content is not None:
            headers["content-type"] = "application/json"
        connection = self._connection()
        try:
            try:
                connection.connect()
            except OSError as e:
                raise self.explain_unreachable(e) from e
            connection.sock.settimeout(timeout)
            connection.request(method, urlsplit(self.url).path + path, content.encode() if content is not None else None, headers)
            response = connection.getresponse()
            return Answer(response.status, path, response.read())
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme != "https":
            return http.client.HTTPConnection(host, parts.port, timeout=_CONNECT_S)
        trusted = self._make_ssl_context()
        context = trusted if isinstance(trusted, ssl.SSLContext) else _context(check=trusted)
        return http.client.HTTPSConnection(host, parts.port, timeout=_CONNECT_S, context=context)

    def explain_unreachable(self, error: Exception) -> CommandError:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return CommandError(
                f"The certificate of {self.url} is not trusted: {error}",
                "Set SSL_CERT_FILE to the certificate of its authority.",
                code="certificate",
            )
        return CommandError(
            f"No gateway answers at {self.url}.",
            "`thaw up` starts the mesh; `thaw logs gateway` says why if it does run; THAW_URL names another one.",
            code="no_gateway",
        )


def _is_address(url: str) -> bool:
    """True for http:// or https://, a host, and a port if there is one."""
    try:
        parts = urlsplit(url)
        return url.startswith(("http://", "https://")) and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _context(*, check: bool) -> ssl.SSLContext:
    if check:
        import certifi  # few gateways have a certificate of a public authority

        return ssl.create_default_context(cafile=certifi.where())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _variable(name: str) -> str | None:
    """Return a key of the environment; None without one.

    Raises:
        CommandError: No header can have the key; an error of the HTTP client would show it.
    """
    key = os.environ.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise CommandError(f"{name} has a character that no key has.", "Set it to the key alone, on one line.", code="bad_setting")
    return key or None


def _secret(name: str) -> str | None:
    """Read a file of THAW_SECRETS_DIR, as the services' settings do.

    A gateway's container has its admin key there.
    """
    directory = os.environ.get("THAW_SECRETS_DIR")
    path = Path(directory) / name if directory else None
    return path.read_text().strip() if path is not None and path.is_file() else None


def error_of(status: int, path: str, body: bytes) -> CommandError:
    """The OpenAI-shaped error of a response as ours."""
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), str(error.get("code") or error.get("type") or status)
    except (ValueError, KeyError, TypeError):
        message, code = f"HTTP {status} from {path.partition('?')[0]}", str(status)
    return CommandError(message, _REMEDIES.get(code, ""), code=code)
