"""Add the SSD cache to a remote tier.

The tier verifies the bytes that it reads, and writes them to the disk in the background.

A load has one of three roles, which may change:
    fetching    it has the fill lock: reads cached pieces from the disk, the rest from the source,
                and writes those down
    following   another process fetches: waits for its pieces, and takes over when it dies or gives
                up
    uncached    no space, no permission, a broken disk: reads from the source only, which is logged
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shared.errors import ThawError
from weights.cache.journal import FileHead
from weights.cache.locks import FileLock
from weights.cache.partial import PartialModel
from weights.cache.store import EntryHandle, EntryRecord, SsdCache
from weights.cache.verify import Verifier
from weights.cache.write_behind import WriteBehind
from weights.tiers.directory import DirectoryTier
from weights.tiers.port import Cancelled, Tier, TierFile

log = logging.getLogger(__name__)
_POLL_S = 0.03
_PATIENCE_S = 30.0
"""Seconds that a follower waits for a fetching process without progress."""
_REST_BYTES = 8 * 1024 * 1024
_REST_AHEAD = 8
"""Pieces of `_REST_BYTES` in memory that a disk slower than the source has still to write."""


class CachingTier:
    """A cache in front of the remote tier `inner`.

    Memory given to `read` must not change until the event of `get_settled_event` is set, or
    `close`: its bytes are still hashed and written to the cache.
    """

    def __init__(
        self,
        inner: Tier,
        cache: SsdCache,
        *,
        pinned: bool = False,
        follows: bool = True,
        patience_s: float = _PATIENCE_S,
        on_wrong: Callable[[TierFile], None] = lambda file: None,
    ) -> None:
        """Choose a role.

        Args:
            inner: The remote tier.
            cache: The cache of this machine.
            pinned: The model is not evicted.
            follows: Wait for ranges while another process fetches the model. A load of a part does
                not: the other one may fetch another part.
            patience_s: Seconds that a follower waits without progress.
            on_wrong: Called with each file whose checksum is wrong.
        """
        self.inner, self._cache, self._pinned, self._patience_s = inner, cache, pinned, patience_s
        self._on_wrong = on_wrong
        self.source, self.link, self.revision = inner.source, inner.link, inner.revision
        self._files = list(inner.files())
        self._verifier = Verifier(self._files, inner.source, self._record_wrong)
        self._state = threading.Lock()
        self._partial: PartialModel | None = None
        self._fill: FileLock | None = None
        self._whole: tuple[DirectoryTier, EntryHandle] | None = None
        self._bad: list[TierFile] = []
        self._stop, self._settled = threading.Event(), threading.Event()
        self._behind = WriteBehind()
        self._rest: threading.Thread | None = None
        self._following = follows
        self._in_turn: Callable[[int, Callable[[], None]], None] = lambda _, read: read()
        self._old: list[PartialModel] = []
        self._closed = False
        self._begin()

    @property
    def directory(self) -> Path | None:
        return None

    def files(self) -> Sequence[TierFile]:
        return self._files

    @property
    def caches(self) -> bool:
        """True if bytes that are read are being cached."""
        return self._fill is not None

    @property
    def is_following(self) -> bool:
        """True if another process fetches the model, and this load waits for it."""
        return self._following and not (self.caches or self._whole is not None or self._closed)

    def read(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> None:
        is_local = self.read_local(file, offset, into, cancelled)
        if not is_local:
            self.inner.read(file, offset, into, cancelled)
        self.keep(file, offset, into, is_local=is_local)

    def keep(self, file: TierFile, offset: int, data: memoryview, *, is_local: bool) -> None:
        """Verify bytes that were read, and cache them unless they are from this host's disk.

        Args:
            file: The file that they are of.
            offset: Their position in the file.
            data: The bytes, which must not change until `close`.
            is_local: True if they are from this host's disk.
        """
        if not is_local:
            self._write_behind(file, offset, data)
        self._verifier.put(file, offset, memoryview(data))

    def finish(self, cancelled: threading.Event | None = None) -> None:
        self._verifier.wait(cancelled)
        self.inner.finish(cancelled)
        if self.caches:
            self._verifier.release()
        with self._state:
            if self._rest is None and not self._closed:
                self._rest = threading.Thread(target=self._complete, name="cache-rest", daemon=True)
                self._rest.start()

    def finish_part(self) -> None:
        """Settle after the load of a part: keep the ranges that were read, and fetch no more."""
        with self._state:
            if self._rest is None and not self._closed:
                self._rest = threading.Thread(target=self._drain, name="cache-part", daemon=True)
                self._rest.start()

    def _drain(self) -> None:
        try:
            self._behind.wait_until_drained(self._stop)
        except Cancelled:
            return
        finally:
            self._settled.set()

    def complete(self, in_turn: Callable[[int, Callable[[], None]], None], cancelled: threading.Event) -> None:
        """Fetch all that the cache lacks, in the background. Nothing was read before.

        Args:
            in_turn: Called with the bytes and the function of each read, which it calls.
            cancelled: Ends it soon. `close` sets it too.
        """
        self._in_turn, self._stop = in_turn, cancelled
        self.finish()

    def wait_for_other_process(self, cancelled: threading.Event) -> None:
        """Wait while another process fetches the model.

        Returns when the cache has it, or when this load may fetch it (`caches`). Gives up after the
        patience without progress, and soon after `cancelled`.
        """
        waited_since = time.monotonic()
        while self.is_following:
            if self._has_progressed():
                waited_since = time.monotonic()
            elif time.monotonic() - waited_since > self._patience_s:
                log.warning("another process fetches this model without progress", extra={"source": self.source})
                self._following = False
            elif cancelled.wait(_POLL_S):
                return

    def count_cached_bytes(self) -> tuple[int, int]:
        """Return the bytes that the disk has, and those of all files."""
        total = sum(f.size for f in self._files)
        partial = self._partial
        if self._whole is not None or partial is None:
            return (total if self._whole is not None else 0), total
        return total - sum(end - start for f in self._files for start, end in partial.list_missing(f)), total

    def get_settled_event(self) -> threading.Event:
        return self._settled

    def close(self) -> None:
        with self._state:
            first, self._closed = not self._closed, True
        self._stop.set()
        self._behind.close()
        self._verifier.close()
        if self._rest is not None and self._rest is not threading.current_thread():
            self._rest.join()
        if first:
            if self._partial is not None:
                self._drop_bad(self._partial)
                self._partial.close()
            for partial in self._old:
                partial.close()
            self._release_fill_lock()
            if self._whole is not None:
                self._whole[1].release()
            self.inner.close()
        self._settled.set()

    # -- roles -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Choose a role: fetching, following or uncached."""
        try:
            fill = self._cache.try_fill_lock(self.revision)
        except OSError as e:
            self._log_uncached(e)
            return
        if fill is not None:
            self._use_fill_lock(fill)

    def _use_fill_lock(self, fill: FileLock) -> bool:
        """Read the model from the cache if it is complete there by now; else become fetching.

        Reserving room may wait for other loaders, and remove models: `_state` is not held.

        Args:
            fill: Released unless this load fetches.

        Returns:
            True if this load fetches.
        """
        is_fetching = False
        try:
            entry = self._cache.acquire(self.revision, pinned=self._pinned or None)
            has_room = entry is None and self._make_room()
            with self._state:
                if self._closed:
                    if entry is not None:
                        entry.release()
                elif entry is not None:
                    self._whole = DirectoryTier(entry.directory), entry
                elif has_room:
                    self._replace_partial(self._open_partial(writes=True))
                    self._fill, is_fetching = fill, True
                else:
                    self._following = False
        except OSError as e:
            with self._state:
                if not self._closed:
                    self._log_uncached(e)
        finally:
            if not is_fetching:
                fill.release()
        return is_fetching

    def _make_room(self) -> bool:
        """Reserve room in the cache.

        Returns:
            False if there is no room: the load has no cache then.

        Raises:
            OSError: The disk failed.
        """
        total = sum(f.size for f in self._files)
        has_room = self._cache.make_room(self.revision, total)
        if not has_room:
            log.warning(
                "no room in the SSD cache: the model is loaded without it",
                extra={"source": self.source, "bytes": total, "budget": self._cache.budget, "directory": str(self._cache.root)},
            )
        return has_room

    def read_local(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> bool:
        """Fill `into` from this host's disk; False if the bytes are not there."""
        waited_since = time.monotonic()
        while True:
            if self._whole is not None:
                self._whole[0].read(replace(file, version=""), offset, into, cancelled)
                return True
            partial = self._partial
            if partial is not None and partial.read(file, offset, into):
                return True
            if self._fill is not None or not self._following:
                return False
            if self._closed:
                raise Cancelled
            if self._has_progressed():
                waited_since = time.monotonic()
                continue
            if time.monotonic() - waited_since > self._patience_s:
                log.warning(
                    "another process fetches this model without progress; reading the source too", extra={"source": self.source}
                )
                self._following = False
                return False
            if self._stop.wait(_POLL_S) or (cancelled is not None and cancelled.is_set()):
                raise Cancelled

    def _has_progressed(self) -> bool:
        """Return True if the other process made progress, or this load took over from it."""
        with self._state:
            if self._fill is not None or self._whole is not None or self._closed:
                return True
            try:
                if self._partial is not None and not self._partial.stale:
                    if self._partial.refresh():
                        return True
                elif self._cache.get_partial_path(self.revision).exists():
                    self._replace_partial(self._open_partial(writes=False))
                    return True
                fill = self._cache.try_fill_lock(self.revision)
            except OSError as e:
                self._log_uncached(e)
                return True
        if fill is None:
            return False
        if self._use_fill_lock(fill):
            log.info("took over a model that another process was fetching", extra={"source": self.source})
        return True

    def _open_partial(self, *, writes: bool) -> PartialModel:
        return PartialModel(self._cache.get_partial_path(self.revision), self.revision, self.source, self._files, writes=writes)

    def _replace_partial(self, new: PartialModel) -> None:
        # Other threads may be reading from the old one: it is closed at the end.
        self._old.extend([self._partial] if self._partial is not None else [])
        self._partial = new

    def _log_uncached(self, error: OSError) -> None:
        log.warning(
            "the SSD cache cannot be written: the model is loaded without it",
            extra={"source": self.source, "directory": str(self._cache.root), "error": str(error)},
        )
        self._following = False
        if self._fill is not None and self._partial is not None and self._partial.writes:
            self._partial.remove()
        self._release_fill_lock()

    def _release_fill_lock(self) -> None:
        if self._fill is not None:
            self._fill.release()
            self._fill = None

    # -- writing -----------------------------------------------------------------------------------

    def _write_behind(self, file: TierFile, offset: int, data: memoryview) -> None:
        with self._state:
            if self._fill is None or self._partial is None or self._closed or self._bad:
                return
            fetched, view = self._partial, memoryview(data)
            self._behind.submit(lambda: self._write(fetched, file, offset, view))

    def _write(self, partial: PartialModel, file: TierFile, offset: int, data: memoryview) -> None:
        if self._fill is None:
            return
        try:
            partial.write(file, offset, data)
        except OSError as e:
            with self._state:
                if self._fill is not None:
                    self._log_uncached(e)

    def _record_wrong(self, file: TierFile) -> None:
        self._bad.append(file)
        self._on_wrong(file)

    def _drop_bad(self, partial: PartialModel) -> None:
        """Remove the damaged file, and unverified ones from the same source.

        Only without writes in progress, which would restore a piece.
        """
        if not self._bad or self._fill is None:
            return
        for file in self._files:
            if file in self._bad or not self._verifier.is_hashed(file.name):
                with contextlib.suppress(OSError):
                    partial.drop(file)

    def _complete(self) -> None:
        """Finish the cache entry after a load.

        The tier fetches files that the load did not need, writes everything, and completes the
        entry.
        """
        try:
            self._verifier.drain(self._stop)
            for file in self._files:
                if self._fill is None:
                    break
                self._read_rest(file)
            self._behind.wait_until_drained(self._stop)
            if self._fill is not None:
                self._promote()
        except Cancelled:
            return
        except (ThawError, OSError) as e:
            log.warning("a model was not kept in the SSD cache", extra={"source": self.source, "error": str(e)})
        finally:
            self._settled.set()

    def _read_rest(self, file: TierFile) -> None:
        for offset in range(0, file.size, _REST_BYTES):
            if self._stop.is_set():
                raise Cancelled
            if self._verifier.is_hashed(file.name):
                return
            into = memoryview(bytearray(min(_REST_BYTES, file.size - offset)))
            self._in_turn(len(into), functools.partial(self.read, file, offset, into, self._stop))
            self._verifier.drain(self._stop)
            self._behind.wait_until_at_most(_REST_AHEAD, self._stop)

    def _promote(self) -> None:
        partial = self._partial
        assert partial is not None
        if any(partial.list_missing(f) for f in self._files):
            return
        partial.make_whole()
        self._verifier.drain(self._stop)
        self._verifier.wait(self._stop)
        heads = tuple(
            FileHead(name=f.name, size=f.size, version=f.version, sha256=f.sha256 or self._verifier.sha256_of(f.name), md5=f.md5)
            for f in self._files
        )
        self._cache.promote(EntryRecord(revision=self.revision, source=self.source, files=heads))
        if self._pinned:
            self._cache.pin(self.revision, True)
        with self._state:
            self._release_fill_lock()
        log.info("kept a model in the SSD cache", extra={"source": self.source, "bytes": sum(f.size for f in self._files)})
