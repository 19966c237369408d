"""Reads of object stores that send nothing, or refuse a signature that was valid."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InvalidModel, Unavailable
from tests.integration.loader.tiers_server import TierServer
from weights.tiers import object_store
from weights.tiers.http_client import HttpClient
from weights.tiers.object_store import ObjectStoreTier
from weights.tiers.ranges import RangeReader, RemoteFile
from weights.tiers.retry import Backoff

QUICK = Backoff(attempts=3, first_s=0.001)
CONTENT = bytes(range(256)) * 16
NAME = "w.safetensors"


class _Answer:
    """An answer of obstore without a body."""

    def stream(self, *, min_chunk_size: int) -> Iterator[bytes]:
        return iter(())


def test_answers_without_a_byte_are_counted_as_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def get(*_: Any, **__: Any) -> _Answer:
        asked.append(None)
        assert len(asked) <= QUICK.attempts
        return _Answer()

    monkeypatch.setattr("obstore.get", get)
    tier = ObjectStoreTier("s3://bucket/m", QUICK)
    with pytest.raises(Unavailable, match="no bytes"):
        tier._fill_unsigned(RemoteFile(lambda: "", "s3://bucket/m/x", 10), 0, memoryview(bytearray(10)), None)
    tier.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TierServer]:
    (tmp_path / NAME).write_bytes(CONTENT)
    with contextlib.closing(TierServer(tmp_path)) as server:
        yield server


class Signing:
    """Signs URLs with numbers, and is read by a range reader."""

    def __init__(self, server: TierServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.count = 1_000.0, 0
        self._server = server
        monkeypatch.setattr("obstore.sign", self._sign)
        monkeypatch.setattr(object_store, "time", self)
        signed = object_store._Signed(None, NAME)  # type: ignore[arg-type]  # the store is asked by obstore.sign only
        self.file = RemoteFile(signed, f"s3://bucket/{NAME}", len(CONTENT), renew=signed.renew)

    def monotonic(self) -> float:
        return self.now

    def _sign(self, *_: Any) -> str:
        self.count += 1
        return f"{self._server.url}/{NAME}?signature={self.count}"

    def read(self) -> bytes:
        data = bytearray(len(CONTENT))
        with contextlib.closing(HttpClient()) as client:
            RangeReader(client, QUICK).read(self.file, 0, memoryview(data), threading.Event())
        return bytes(data)


def test_signature_of_expired_credentials_is_renewed(server: TierServer, monkeypatch: pytest.MonkeyPatch) -> None:
    signing = Signing(server, monkeypatch)
    assert signing.read() == CONTENT
    signing.now += 300
    server.faults.statuses = [403]
    assert signing.read() == CONTENT
    assert signing.count == 2


def test_refusal_of_a_new_signature_is_final(server: TierServer, monkeypatch: pytest.MonkeyPatch) -> None:
    signing = Signing(server, monkeypatch)
    server.faults.status = 403
    with pytest.raises(InvalidModel, match="refuses access"):
        signing.read()
    assert len(server.requests) == 1
