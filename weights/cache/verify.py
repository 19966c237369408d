"""Checksums of whole files whose pieces arrive in any order."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from shared.errors import CheckpointInvalid
from weights.cache.background import lower_thread_priority
from weights.tiers.port import Cancelled, TierFile

_THREADS = 2
_SLICE_S = 0.1
_PIECE_BYTES = 4 * 1024 * 1024


@dataclass
class _Digest:
    file: TierFile
    algorithm: str
    expected: str | None
    hashed_bytes: int = 0
    pending: dict[int, memoryview] = field(default_factory=dict)
    busy: bool = False
    hexdigest: str | None = None
    has_data: bool = False

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
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="verify", initializer=lower_thread_priority)

    def put(self, file: TierFile, offset: int, data: memoryview) -> None:
        """Hash a piece.

        Args:
            file: The file that it is a piece of.
            offset: Its position in the file.
            data: Its bytes, which must not change until they are verified, or until `close`.
        """
        digest = self._digests[file.name]
        with self._changed:
            if self._closed or digest.hexdigest is not None or offset + len(data) <= digest.hashed_bytes:
                return
            known = digest.pending.get(offset)
            if known is None or len(known) < len(data):
                digest.pending[offset] = data
            digest.has_data = True
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
        """Wait until no file is being hashed. Raises `Cancelled`."""
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
                if all(d.hexdigest is not None for d in self._digests.values() if d.has_data and d.expected) or self._closed:
                    return
                if not any(d.busy for d in self._digests.values()):
                    return  # no piece is pending: another load reads the rest of the file
                self._changed.wait(_SLICE_S)
                if cancelled is not None and cancelled.is_set():
                    raise Cancelled

    def sha256_of(self, name: str) -> str | None:
        """Return the SHA-256 of a complete file.

        None for an incomplete file, or a file with an MD5.
        """
        digest = self._digests[name]
        return digest.hexdigest if digest.algorithm == "sha256" else None

    def is_hashed(self, name: str) -> bool:
        """True if all bytes of the file have been hashed."""
        return self._digests[name].hexdigest is not None

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
                data = None if self._closed else _pop_next(digest)
                if data is None:
                    digest.busy = False
                    self._changed.notify_all()
                    return
            for at in range(0, len(data), _PIECE_BYTES):
                if self._closed:
                    break
                digest.state.update(data[at : at + _PIECE_BYTES])
            with self._changed:
                digest.hashed_bytes += len(data)
                if digest.hashed_bytes == digest.file.size and not self._closed:
                    self._end(digest)

    def _end(self, digest: _Digest) -> None:
        digest.hexdigest = digest.state.hexdigest()
        digest.pending.clear()
        if digest.expected is not None and digest.hexdigest != digest.expected:
            self._wrong = self._wrong or CheckpointInvalid(
                f"{self._where}/{digest.file.name} has the {digest.algorithm} {digest.hexdigest[:16]}… instead of {digest.expected[:16]}…: it "
                "was damaged on the way or at its source; it is not kept, load it again or put it right at the source",
                should_retry=True,
            )
            self._on_wrong(digest.file)


def _digest(file: TierFile) -> _Digest:
    if file.sha256 is None and file.md5 is not None:
        return _Digest(file, "md5", file.md5.lower())
    return _Digest(file, "sha256", file.sha256.lower() if file.sha256 is not None else None)


def _pop_next(digest: _Digest) -> memoryview | None:
    """Take out the pending bytes that follow those already hashed; None if there are none."""
    for offset in sorted(digest.pending):
        if offset > digest.hashed_bytes:
            return None
        data = digest.pending.pop(offset)
        if offset + len(data) > digest.hashed_bytes:
            return memoryview(data)[digest.hashed_bytes - offset :]
    return None
