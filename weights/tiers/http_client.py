"""Send HTTP requests over kept connections.

The client uses proxies from the environment, follows redirects, and sends credentials to their host
only.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit
from urllib.request import getproxies_environment, proxy_bypass

from weights.tiers.connection import Connection, Origin, Patience

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 10
_REUSABLE_LEFT = 256 * 1024
"""A body with no more than this left is read to its end, so that its connection can be kept."""
_PORTS = {"http": 80, "https": 443}


def redact_url(url: str) -> str:
    """`url` for messages: without user, password and query, which may be secrets."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], unquote(parts.path), "", ""))


@dataclass
class Answer:
    """A response: its headers are read, its body is not.

    Attributes:
        url: After redirects.
    """

    url: str
    response: http.client.HTTPResponse
    _connection: Connection
    _client: HttpClient

    @property
    def status(self) -> int:
        return self.response.status

    def header(self, name: str) -> str | None:
        return self.response.headers.get(name)

    def readinto(self, into: memoryview) -> int:
        """Read bytes of the body; return their number, at least one.

        0 at the body's end, or where it was cut: the caller knows the expected length.
        """
        return self.response.readinto(into)

    def read(self, limit: int) -> bytes:
        """The body, `limit` bytes of it at most."""
        return self.response.read(limit)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Keep the connection if the body is (nearly) through; else close it."""
        response = self.response
        little_left = response.length is not None and response.length < _REUSABLE_LEFT
        if kind is None and little_left and not response.will_close and not response.isclosed():
            with contextlib.suppress(OSError, http.client.HTTPException):
                response.read()
        self._end(reusable=kind is None and response.isclosed() and not response.will_close)

    def close(self) -> None:
        """Give the rest of the body up, and the connection with it."""
        self._end(reusable=False)

    def _end(self, *, reusable: bool) -> None:
        self.response.close()
        self._client.give_back(self._connection, reusable=reusable)


class HttpClient:
    """Connections to any hosts, kept between requests.

    TLS trusts the system's authorities, or those of SSL_CERT_FILE / SSL_CERT_DIR.

    Args:
        headers: Sent to the origin of each request only, never along a redirect to another host.
        direct: Use no proxy.
    """

    def __init__(self, headers: Mapping[str, str] | None = None, patience: Patience | None = None, *, direct: bool = False) -> None:
        self._headers, self._patience, self._direct = dict(headers or {}), patience or Patience(), direct
        self._idle: dict[Origin, list[Connection]] = {}
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    def get(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        cancelled: threading.Event | None = None,
        *,
        home: str | None = None,
    ) -> Answer:
        """The answer to a GET of `url`, redirects followed.

        Args:
            headers: Sent to every host.
            home: The URL that led to `url` by earlier redirects: the client's headers go to its
                origin only. None: `url` itself.

        Raises `OSError`, `http.client.HTTPException`, `Cancelled`.
        """
        try:
            return self._follow(url, headers, cancelled, home or url)
        except OSError:  # a wrong certificate is a ValueError too
            raise
        except ValueError as e:  # an invalid port or IPv6 address, or a host name that is too long
            raise http.client.InvalidURL(f"an invalid URL, of the source or of a redirect: {e}") from e

    def _follow(self, url: str, headers: Mapping[str, str] | None, cancelled: threading.Event | None, home: str) -> Answer:
        trusted = _place(home)
        for _ in range(_MOST_REDIRECTS):
            own = self._headers if _place(url) == trusted else {}
            answer = self._get_once(url, {**own, **(headers or {})}, cancelled)
            target = answer.header("Location")
            if answer.status not in _REDIRECTS or target is None:
                return answer
            with answer:
                url = urljoin(url, target)
            if urlsplit(url).scheme not in _PORTS:
                raise http.client.HTTPException(f"redirected to {redact_url(url)}, which is neither http nor https")
        raise http.client.HTTPException(f"more than {_MOST_REDIRECTS} redirects")

    def _get_once(self, url: str, headers: Mapping[str, str], cancelled: threading.Event | None) -> Answer:
        parts = urlsplit(url)
        origin = _origin(url, direct=self._direct)
        target = urlunsplit(("", "", quote(parts.path or "/", safe="/%:@!$&'()*+,;=~"), parts.query, ""))
        if origin.proxy is not None and origin.scheme == "http":
            target = f"http://{parts.netloc.rpartition('@')[2]}{target}"
        sent = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "identity", "User-Agent": "thaw-loader", **headers}
        if parts.username is not None and "Authorization" not in sent:
            sent["Authorization"] = basic(parts.username, parts.password or "")
        if origin.scheme == "http" and origin.proxy_authorization:
            sent["Proxy-Authorization"] = origin.proxy_authorization
        while True:
            connection, kept = self._connection(origin, cancelled)
            try:
                return Answer(url, connection.request("GET", target, sent, cancelled), connection, self)
            except (OSError, http.client.HTTPException) as e:
                connection.close()
                if not kept:  # a kept one may have been hung up at any time: no fault of the server's
                    raise
                if isinstance(e, TimeoutError):  # the network dropped it, and probably the others: each would time out too
                    self._close_idle(origin)
            except BaseException:
                connection.close()
                raise

    def _connection(self, origin: Origin, cancelled: threading.Event | None) -> tuple[Connection, bool]:
        while True:
            with self._lock:
                idle = self._idle.get(origin)
                connection = idle.pop() if idle else None
            if connection is None:
                return Connection(origin, self._context() if origin.scheme == "https" else None, self._patience, cancelled), False
            if connection.alive:
                return connection, True
            connection.close()

    def _close_idle(self, origin: Origin) -> None:
        with self._lock:
            idle = self._idle.pop(origin, [])
        for connection in idle:
            connection.close()

    def give_back(self, connection: Connection, *, reusable: bool) -> None:
        with self._lock:
            if reusable and not self._closed:
                self._idle.setdefault(connection.origin, []).append(connection)
                return
        connection.close()

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = ssl.create_default_context()
            return self._tls

    def close(self) -> None:
        """Close what is idle now, and what is in use when it is given back."""
        with self._lock:
            self._closed = True
            idle = [c for connections in self._idle.values() for c in connections]
            self._idle.clear()
        for connection in idle:
            connection.close()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()


def _place(url: str) -> tuple[str, str | None, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme, 0)


def _origin(url: str, *, direct: bool = False) -> Origin:
    """Return the address to connect to for `url`.

    HTTP_PROXY (in lower case only where a CGI variable is possible), HTTPS_PROXY and NO_PROXY
    apply.
    """
    scheme, host, port = _place(url)
    if scheme not in _PORTS or not host:
        raise http.client.InvalidURL(f"{redact_url(url)} is not an http(s) URL")
    proxies = getproxies_environment()
    proxy = proxies.get(scheme) or proxies.get("all")
    if direct or proxy is None or proxy_bypass(f"{host}:{port}"):
        return Origin(scheme, host, port)
    through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    authorization = basic(through.username, through.password or "") if through.username is not None else None
    return Origin(scheme, host, port, (through.hostname or "", through.port or 80), authorization)
