"""Read a range of one remote file into memory.

The reader resumes after a lost connection, retries, and never mixes two versions of the file.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPMessage

from shared.errors import CheckpointInvalid, InvalidModel, ThawError, Unavailable
from weights.tiers.http_client import Answer, HttpClient
from weights.tiers.retry import FAULTS, RETRIED_STATUSES, Backoff
from weights.tiers.whole import WholeFileStream

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_REDIRECT_KEPT_S = 300.0
_ABSENT = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.GONE})
_REFUSED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED, *_ABSENT})


class Retry(Exception):
    """This attempt failed, the next one may not.

    Attributes:
        asked: Value of the server's Retry-After; None: it sent none.
    """

    def __init__(self, why: str, asked: str | None = None) -> None:
        super().__init__(why)
        self.asked = asked


@dataclass
class RemoteFile:
    """One file behind `url()`, which may sign at each call.

    `renew()` makes `url()` sign again; it returns False if the signature is new.

    Attributes:
        where: Name of the file in messages.
        size: Bytes of every answer; None: those of the first answer.
        validator: ETag or Last-Modified of every answer; None: that of the first answer.
        headers: Headers of the first answer.
        key: Key of the file in its store.
        whole_only: The server has shown that it knows no ranges.
    """

    url: Callable[[], str]
    where: str
    size: int | None = None
    validator: str | None = None
    final: tuple[str, float] | None = None
    stream: WholeFileStream | None = None
    headers: HTTPMessage | None = None
    key: str = ""
    whole_only: bool = False
    renew: Callable[[], bool] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def address(self) -> str:
        """The target of the latest redirects, for a while; otherwise the URL itself."""
        final = self.final
        return final[0] if final is not None and time.monotonic() < final[1] else self.url()

    def in_order(self, connect: Callable[[threading.Event | None], Answer]) -> WholeFileStream:
        with self.lock:
            if self.stream is None:
                self.stream = WholeFileStream(connect)
            return self.stream

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


def refusal(where: str, status: int) -> ThawError:
    if status in _ABSENT:
        return CheckpointInvalid(f"{where} is not there (the server answered {status}); correct the source, or put the file there")
    return InvalidModel(f"{where}: the server refuses access ({status}); give the loader the right credentials")


class RangeReader:
    """Reads for one tier, from several threads.

    `refused(where, status)` is the error for 401, 403, 404, 407 and 410.
    """

    def __init__(
        self, client: HttpClient, backoff: Backoff | None = None, refused: Callable[[str, int], ThawError] = refusal
    ) -> None:
        self._client, self._backoff, self._refused = client, backoff or Backoff(), refused

    def read(self, file: RemoteFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> None:
        """Fill `into` from `offset` on.

        Raises `CheckpointInvalid`, `Unavailable`, `InvalidModel` or `Cancelled`.
        """
        done = failures = 0
        while done < len(into):
            try:
                with into[done:] as rest:
                    done += self._read_some(file, offset + done, rest, cancelled)
                failures = 0
            except (Retry, *FAULTS) as e:
                failures = self._back_off(file, failures, e, cancelled)

    def head(self, file: RemoteFile, limit: int, cancelled: threading.Event | None = None) -> bytes | None:
        """The first bytes, `limit` at most; learns size and validator.

        None if the file is not there.
        """
        failures = 0
        while True:
            try:
                return self._head(file, limit, cancelled)
            except (Retry, *FAULTS) as e:
                failures = self._back_off(file, failures, e, cancelled)

    def _back_off(self, file: RemoteFile, failures: int, error: Exception, cancelled: threading.Event | None) -> int:
        failures += 1
        if failures >= self._backoff.attempts:
            why = str(error) or type(error).__name__
            raise Unavailable(
                f"{file.where} could not be read in {failures} attempts ({why}); check the server, the network and the proxy variables",
                should_retry=True,
            ) from error
        self._backoff.pause(failures, error.asked if isinstance(error, Retry) else None, cancelled)
        return failures

    def _head(self, file: RemoteFile, limit: int, cancelled: threading.Event | None) -> bytes | None:
        with self._get(file, 0, limit, cancelled) as answer:
            if answer.status in _ABSENT:
                return None
            if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # an empty file has no first byte
                file.size = 0
                return b""
            self._accept(file, answer, 0)
            wanted = limit if file.size is None else min(limit, file.size)
            file.whole_only = answer.status == HTTPStatus.OK and file.size is not None and file.size > limit
            data = answer.read(wanted)
        if file.size is not None and len(data) < wanted:
            raise Retry("the connection was cut")
        if file.size is None:
            raise Retry("the server does not say how large the file is")
        return data

    def _read_some(self, file: RemoteFile, offset: int, into: memoryview, cancelled: threading.Event | None) -> int:
        """Make one attempt; returns the number of bytes read, at least one."""
        if not file.whole_only:
            with self._get(file, offset, len(into), cancelled) as answer:
                self._accept(file, answer, offset)
                if answer.status == HTTPStatus.PARTIAL_CONTENT or offset == 0:
                    return _fill(into, answer)
                file.whole_only = True
        # The server has no ranges: the file is read over one connection, in order.
        return file.in_order(lambda called_off: self._get_whole(file, called_off)).read(offset, into, cancelled)

    def _get_whole(self, file: RemoteFile, cancelled: threading.Event | None) -> Answer:
        answer = self._client.get(file.address(), cancelled=cancelled, home=file.url())
        try:
            self._accept(file, answer, 0)
        except BaseException:
            answer.close()
            raise
        return answer

    def _get(self, file: RemoteFile, offset: int, length: int, cancelled: threading.Event | None) -> Answer:
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        if file.validator is not None and not file.validator.startswith("W/"):
            headers["If-Range"] = file.validator
        asked = file.address()
        answer = self._client.get(asked, headers, cancelled, home=file.url())
        if answer.url != asked:
            file.final = (answer.url, time.monotonic() + _REDIRECT_KEPT_S)
        return answer

    def _accept(self, file: RemoteFile, answer: Answer, offset: int) -> None:
        """Raise unless `answer` has bytes of this version of the file.

        They begin at `offset` (206) or at the start (200).
        """
        status = answer.status
        if status in _REFUSED:
            if file.final is not None:  # the place that redirects led to is out of date
                file.final = None
                if answer.url != file.url():
                    raise Retry(f"the server refused access ({status})")
            elif file.renew is not None and (answer.url != file.url() or file.renew()):
                # The credentials expired before the signature, which the URL does not show.
                raise Retry(f"the server refused access ({status})")
            raise self._refused(file.where, status)
        if status in RETRIED_STATUSES:
            raise Retry(f"the server answered {status}", answer.header("Retry-After"))
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise _make_changed_error(file)
        if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            raise InvalidModel(f"{file.where}: the server answered {status}; correct the source")
        if (answer.header("Content-Encoding") or "identity") != "identity":
            raise InvalidModel(f"{file.where} is sent compressed, though asked for as it is; switch that off in the server")
        size = _size(answer, offset)
        validator = answer.header("ETag") or answer.header("Last-Modified")
        if (file.size is not None and size not in (None, file.size)) or (
            file.validator is not None and file.validator not in (answer.header("ETag"), answer.header("Last-Modified"))
        ):
            raise _make_changed_error(file)
        file.headers = file.headers if file.headers is not None else answer.response.headers
        file.size = size if file.size is None else file.size
        file.validator = validator if file.validator is None else file.validator


def _size(answer: Answer, offset: int) -> int | None:
    """Bytes of the whole file, where the answer says it.

    Raises `Retry` for a part that was not asked for.
    """
    if answer.status == HTTPStatus.OK:
        return answer.response.length
    found = _CONTENT_RANGE.fullmatch(answer.header("Content-Range") or "")
    if found is None or int(found[1]) != offset:
        raise Retry(f"the server sent {answer.header('Content-Range') or 'an unnamed part'} instead of bytes from {offset} on")
    return None if found[3] == "*" else int(found[3])


def _fill(into: memoryview, answer: Answer) -> int:
    """Read until `into` is full or the body ends.

    The bytes read before a connection breaks are kept.
    """
    done = 0
    try:
        while done < len(into):
            with into[done:] as rest:
                got = answer.readinto(rest)
            if got == 0:
                break
            done += got
    except FAULTS:
        if done == 0:
            raise
    if done == 0:
        raise Retry("the connection was cut")
    return done


def _make_changed_error(file: RemoteFile) -> CheckpointInvalid:
    return CheckpointInvalid(f"{file.where} has changed since it was listed; register the model again (thaw models add)")
