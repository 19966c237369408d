"""Checksums of whole files whose pieces arrive in any order."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from shared.errors import CheckpointInvalid
from weights.cache.background import step_back
from weights.tiers.port import Cancelled, TierFile

_THREADS = 2
_SLICE_S = 0.1
_PIECE_BYTES = 4 * 1024 * 1024


@dataclass
class _Digest:
    file: TierFile
    algorithm: str
    expected: str | None
    at: int = 0
    pending: dict[int, memoryview] = field(default_factory=dict)
    busy: bool = False
    found: str | None = None
    given: bool = False

    def __post_init__(self) -> None:
        self.state = hashlib.new(self.algorithm, usedforsecurity=False)


class Verifier:
    """SHA-256 of each file (MD5 if only that is known), fed by `put`.

    Calls `on_wrong(file)` once for a damaged file.
    """

    def __init__(self, files: Sequence[TierFile], where: str, on_wrong: Callable[[TierFile], None]) -> None:
        self._where, self._on_wrong = where, on_wrong
        self._digests = {f.name: _digest(f) for f in files}
        self._changed = threading.Condition()
        self._wrong: CheckpointInvalid | None = None
        self._closed = self._released = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="verify", initializer=step_back)

    def put(self, file: TierFile, offset: int, data: memoryview) -> None:
        """`data` must hold these bytes until they are verified, or until `close`."""
        digest = self._digests[file.name]
        with self._changed:
            if self._closed or digest.found is not None or offset + len(data) <= digest.at:
                return
            known = digest.pending.get(offset)
            if known is None or len(known) < len(data):
                digest.pending[offset] = data
            digest.given = True
            self._start(digest)

    def _start(self, digest: _Digest) -> None:
        if not digest.busy and not self._closed and (digest.expected is not None or self._released):
            digest.busy = True
            self._pool.submit(self._advance, digest)

    def release(self) -> None:
        """Hash the files without a known checksum too, at low priority."""
        with self._changed:
            self._released = True
            for digest in self._digests.values():
                if digest.pending:
                    self._start(digest)

    def drain(self, cancelled: threading.Event) -> None:
        """Wait until all pieces that can be hashed are. Raises `Cancelled`."""
        with self._changed:
            while any(d.busy for d in self._digests.values()):
                self._changed.wait(_SLICE_S)
                if cancelled.is_set():
                    raise Cancelled

    def wait(self, cancelled: threading.Event | None = None) -> None:
        """Wait until every started file with a known checksum is verified.

        Raises `CheckpointInvalid`.
        """
        with self._changed:
            while True:
                if self._wrong is not None:
                    raise self._wrong
                if all(d.found is not None for d in self._digests.values() if d.given and d.expected) or self._closed:
                    return
                if not any(d.busy for d in self._digests.values()):
                    return  # nothing more is on its way: a file that was not read whole is not this load's
                self._changed.wait(_SLICE_S)
                if cancelled is not None and cancelled.is_set():
                    raise Cancelled

    def found(self, name: str) -> str | None:
        """Return the SHA-256 of a complete file.

        None for an incomplete file, or a file with an MD5.
        """
        digest = self._digests[name]
        return digest.found if digest.algorithm == "sha256" else None

    def whole(self, name: str) -> bool:
        return self._digests[name].found is not None

    def close(self) -> None:
        """Drop pending pieces; memory given to `put` is not read after this returns."""
        with self._changed:
            self._closed = True
        self._pool.shutdown(cancel_futures=True)
        with self._changed:
            for digest in self._digests.values():
                digest.pending.clear()
                digest.busy = False
            self._changed.notify_all()

    def _advance(self, digest: _Digest) -> None:
        while True:
            with self._changed:
                data = None if self._closed else _next(digest)
                if data is None:
                    digest.busy = False
                    self._changed.notify_all()
                    return
            for at in range(0, len(data), _PIECE_BYTES):
                if self._closed:
                    break
                digest.state.update(data[at : at + _PIECE_BYTES])
            with self._changed:
                digest.at += len(data)
                if digest.at == digest.file.size and not self._closed:
                    self._end(digest)

    def _end(self, digest: _Digest) -> None:
        digest.found = digest.state.hexdigest()
        digest.pending.clear()
        if digest.expected is not None and digest.found != digest.expected:
            self._wrong = self._wrong or CheckpointInvalid(
                f"{self._where}/{digest.file.name} has the {digest.algorithm} {digest.found[:16]}… instead of {digest.expected[:16]}…: it "
                "was damaged on the way or at its source; it is not kept, load it again or put it right at the source",
                should_retry=True,
            )
            self._on_wrong(digest.file)


def _digest(file: TierFile) -> _Digest:
    if file.sha256 is None and file.md5 is not None:
        return _Digest(file, "md5", file.md5.lower())
    return _Digest(file, "sha256", file.sha256.lower() if file.sha256 is not None else None)


def _next(digest: _Digest) -> memoryview | None:
    """The pending bytes at the digest's place, taken out."""
    for offset in sorted(digest.pending):
        if offset > digest.at:
            return None
        data = digest.pending.pop(offset)
        if offset + len(data) > digest.at:
            return memoryview(data)[digest.at - offset :]
    return None
