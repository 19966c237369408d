"""Common parts of all tiers that are read by HTTP.

They list files once, read ranges, and keep the first bytes of each file.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from shared.errors import CheckpointInvalid
from weights.tiers.http_client import HttpClient
from weights.tiers.port import TierFile
from weights.tiers.ranges import RangeReader, RemoteFile

FIRST_BYTES = 100_000
"""Fetched with a weight file's first range: nearly every header fits (huggingface_hub measured
97 %).
"""


class RemoteTier(ABC):
    """A remote store that lists its files and is read by ranges.

    Attributes:
        source: The place, without secrets.
        link: Name of the link that it is read by: the host.
    """

    def __init__(self, source: str, link: str, client: HttpClient, reader: RangeReader) -> None:
        self.source, self.link = source, link
        self._client, self._reader = client, reader
        self._lock = threading.Lock()
        self._listing: dict[str, tuple[TierFile, RemoteFile]] | None = None
        self._first: dict[str, bytes] = {}
        self._settled = threading.Event()
        self._settled.set()

    @property
    def directory(self) -> Path | None:
        return None

    @property
    def revision(self) -> str:
        """Digest of the place, and of every file's name, size and version."""
        digest = hashlib.sha256(f"remote\0{self.source}\0".encode())
        for file in self.files():
            digest.update(f"{file.name}\0{file.size}\0{file.version}\0".encode())
        return digest.hexdigest()[:32]

    def files(self) -> Sequence[TierFile]:
        return [file for file, _ in self._load_listing().values()]

    def read(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> None:
        _, remote = self._known(file)
        first = self._first.get(file.name, b"")
        if offset + len(into) <= len(first):
            into[:] = first[offset : offset + len(into)]
            return
        if offset == 0 and len(into) < FIRST_BYTES:
            data = self._reader.head(remote, FIRST_BYTES, cancelled)
            if data is not None and len(into) <= len(data):
                self._first[file.name] = data
                into[:] = data[: len(into)]
                return
        self._reader.read(remote, offset, into, cancelled)

    def finish(self, cancelled: threading.Event | None = None) -> None:
        """Checksums are checked by what keeps the bytes (weights/cache)."""
        return

    def get_settled_event(self) -> threading.Event:
        return self._settled

    def close(self) -> None:
        self._client.close()
        for _, remote in (self._listing or {}).values():
            remote.close()

    @abstractmethod
    def _list(self) -> list[tuple[TierFile, RemoteFile]]:
        """Ask the place for the model's files."""

    def _load_listing(self) -> dict[str, tuple[TierFile, RemoteFile]]:
        with self._lock:
            if self._listing is None:
                self._listing = {file.name: (file, remote) for file, remote in sorted(self._list(), key=lambda p: p[0].name)}
            return self._listing

    def _known(self, file: TierFile) -> tuple[TierFile, RemoteFile]:
        found = self._load_listing().get(file.name)
        if found is None or found[0].size != file.size:
            raise CheckpointInvalid(f"{self.source}/{file.name} has changed since it was listed; register the model again")
        return found
