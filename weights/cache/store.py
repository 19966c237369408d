"""The SSD cache: complete models by revision in one directory, with a quota.

All loaders of a machine may share it.

entries/REVISION/   a complete model: its files, and entry.json
partial/REVISION/   a model being fetched: its files so far, and the journal
locks/REVISION.use  shared by readers, .fill held by the fetching process; locks/room held during
                    eviction
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from shared.contracts.base import Frozen
from weights.cache.eviction import CacheEntry, plan_eviction
from weights.cache.files import WHOLE_BYTES, check_revision, flush, model_directories, read_promised, size_of, sum_allocated
from weights.cache.journal import FileHead
from weights.cache.locks import FileLock

log = logging.getLogger(__name__)
ENTRY = "entry.json"
_PIN = "pinned"
_KEPT_FREE = 0.02
"""Share of the disk that the cache leaves free, whatever its budget says."""
_STATUS_FOR_S = 1.0
_ROOM_WITHIN_S = 20.0
"""Seconds to wait for another loader that evicts."""


class EntryRecord(Frozen):
    """The content of entry.json.

    Attributes:
        files: With the SHA-256 computed on arrival if the source has none.
    """

    revision: str
    source: str
    files: tuple[FileHead, ...]


@dataclass(frozen=True)
class CacheStatus:
    """Contents of the cache.

    Attributes:
        models: (revision, source, bytes) of complete models.
        disk_bytes: Of its file system; 0: it cannot be measured.
        disk_free_bytes: Of these, what this process may use.
    """

    nbytes: int
    budget: int
    models: tuple[tuple[str, str, int], ...]
    disk_bytes: int
    disk_free_bytes: int


class EntryHandle:
    """A reference to a cache entry, which is not evicted before `release`."""

    def __init__(self, directory: Path, record: EntryRecord, lock: FileLock) -> None:
        self.directory, self.record, self._lock = directory, record, lock

    def release(self) -> None:
        self._lock.release()


class SsdCache:
    """The SSD cache of this machine.

    Args:
        budget: Bytes; 0 caches nothing, None is half of the disk's free bytes, counting the cache's
            present bytes as free.
    """

    def __init__(self, root: Path, budget: int | None = None) -> None:
        self.root = root
        self._entries, self._partial, self._locks = root / "entries", root / "partial", root / "locks"
        self._lock = threading.Lock()
        self._seen: tuple[float, CacheStatus] | None = None
        self.budget = self._default_budget() if budget is None else budget

    # -- reading -----------------------------------------------------------------------------------

    def lookup(self, revision: str) -> Path | None:
        """Return the directory of the complete model.

        It may be evicted at any time: `acquire` it to read it.
        """
        directory = self._entries / check_revision(revision)
        return directory if size_of(directory / ENTRY) >= 0 else None

    def acquire(self, revision: str, *, pinned: bool | None = None) -> EntryHandle | None:
        """Protect the complete model from eviction, and mark it used.

        Args:
            revision: The model.
            pinned: Pin it, or unpin it; None: leave its pin as it is.

        Returns:
            A handle, which the caller releases; None on a cache miss.
        """
        try:
            lock = FileLock.take(self._locks / f"{check_revision(revision)}.use", shared=True)
        except OSError as e:
            log.warning("the SSD cache cannot be used", extra={"directory": str(self.root), "error": str(e)})
            return None
        if lock is None:
            return None  # it is being removed
        directory = self.lookup(revision)
        record = self._record(directory) if directory is not None else None
        if directory is None or record is None:
            lock.release()
            return None
        with contextlib.suppress(OSError):
            os.utime(directory / ENTRY)
        if pinned is not None:
            self.pin(revision, pinned)
        return EntryHandle(directory, record, lock)

    def find(self, source: str) -> str | None:
        """Return the last used revision from `source`, or from any commit of it."""
        found = [(m, r.revision) for m, r in self._records() if r.source == source or r.source.startswith(f"{source}@")]
        return max(found)[1] if found else None

    def status(self) -> CacheStatus:
        """Return the status, at most a second old."""
        now = time.monotonic()
        with self._lock:
            if self._seen is not None and now - self._seen[0] < _STATUS_FOR_S:
                return self._seen[1]
        entries = {e.revision: e for e in self.entries()}
        models = tuple((r.revision, r.source, entries[r.revision].nbytes) for _, r in self._records() if r.revision in entries)
        try:
            disk = shutil.disk_usage(self._find_existing())
            total, free = disk.total, disk.free
        except OSError:
            total = free = 0
        status = CacheStatus(sum(e.nbytes for e in entries.values()), self.budget, models, total, free)
        with self._lock:
            self._seen = (now, status)
        return status

    def entries(self) -> list[CacheEntry]:
        """Return all models, complete or partial.

        `in_use` is not set, because that would take their locks.
        """
        found = []
        for parent, complete in ((self._entries, True), (self._partial, False)):
            for directory in model_directories(parent):
                mark = directory / (ENTRY if complete else "journal")
                with contextlib.suppress(OSError):  # removed meanwhile, or unreadable
                    nbytes = sum_allocated(directory)
                    used = mark.stat().st_mtime if mark.exists() else 0.0
                    pinned = (directory / _PIN).exists()
                    due = 0 if complete else max(0, read_promised(directory) - nbytes)
                    found.append(CacheEntry(directory.name, nbytes, used, pinned, complete=complete, due=due))
        return found

    # -- writing -----------------------------------------------------------------------------------

    def try_fill_lock(self, revision: str) -> FileLock | None:
        """Take the right to fetch a model; None if another load has it. Raises `OSError`."""
        return FileLock.take(self._locks / f"{check_revision(revision)}.fill")

    def get_partial_path(self, revision: str) -> Path:
        return self._partial / check_revision(revision)

    def can_fit(self, revision: str, nbytes: int) -> bool:
        """True if `nbytes` of this revision would fit after evictions; nothing is evicted.

        Entries in use count as evictable.
        """
        try:
            own = sum_allocated(self.get_partial_path(revision))
            disk = shutil.disk_usage(self._find_existing())
            others = [e for e in self.entries() if e.revision != revision]
        except OSError:
            return False
        return plan_eviction(others, nbytes, self.budget, disk.free + own - int(disk.total * _KEPT_FREE)) is not None

    def make_room(self, revision: str, nbytes: int) -> bool:
        """Evict until `nbytes` more fit, and reserve them for this revision.

        The revision's present bytes count. The caller has the fill lock.

        Returns:
            True if they fit.

        Raises:
            OSError: The disk failed.
        """
        own, in_use = sum_allocated(self.get_partial_path(revision)), {revision}
        lock = FileLock.take(
            self._locks / "room", within_s=_ROOM_WITHIN_S
        )  # others that begin meanwhile must see what this one will have
        if lock is None:
            raise TimeoutError(f"another loader has been making room in {self.root} for {_ROOM_WITHIN_S:g} s")
        with lock:
            while True:
                disk = shutil.disk_usage(self._find_existing())
                free = disk.free + own - int(disk.total * _KEPT_FREE)
                others = [replace(e, in_use=e.revision in in_use) for e in self.entries() if e.revision != revision]
                plan = plan_eviction(others, nbytes, self.budget, free)
                if plan == ():
                    self.get_partial_path(revision).mkdir(parents=True, exist_ok=True)
                    (self.get_partial_path(revision) / WHOLE_BYTES).write_text(str(nbytes))
                if not plan:
                    return plan is not None
                in_use |= {gone for gone in plan if not self.remove(gone)}

    def promote(self, record: EntryRecord) -> Path:
        """Make a fetched and verified model an entry.

        The caller has its fill lock. Raises `OSError`.
        """
        partial, entry = self.get_partial_path(record.revision), self._entries / record.revision
        for file in record.files:
            flush(partial / file.name)
        draft = partial / f".{ENTRY}"
        draft.write_text(record.model_dump_json())
        flush(draft)
        draft.replace(partial / ENTRY)
        self._entries.mkdir(parents=True, exist_ok=True)
        if entry.exists():
            shutil.rmtree(entry)
        partial.replace(entry)
        for name in ("journal", WHOLE_BYTES):
            (entry / name).unlink(missing_ok=True)
        flush(self._entries)
        self._forget_status()
        return entry

    def remove(self, revision: str) -> bool:
        """Remove a model, complete or partial, unless it is in use.

        Returns True if it is removed.
        """
        locks: list[FileLock] = []
        try:
            # In this order a reader finds `use` taken only if the model is about to be removed: the
            # load that has `fill` must not take it for absent.
            for kind in ("fill", "use"):
                lock = FileLock.take(self._locks / f"{check_revision(revision)}.{kind}")
                if lock is None:
                    return False
                locks.append(lock)
            for directory in (self._entries / revision, self.get_partial_path(revision)):
                # Without its mark it is no entry any more, whatever of it a crash leaves.
                (directory / ENTRY).unlink(missing_ok=True)
                shutil.rmtree(directory, ignore_errors=True)
                if directory.exists():
                    raise OSError(errno.ENOTEMPTY, "some of its files cannot be removed", str(directory))
            log.info("removed a model from the SSD cache", extra={"revision": revision})
            return True
        except OSError as e:
            log.warning("a model could not be removed from the SSD cache", extra={"revision": revision, "error": str(e)})
            return False
        finally:
            for lock in locks:
                lock.release()
            self._forget_status()

    def pin(self, revision: str, pinned: bool) -> None:
        """Set whether an entry may be evicted. A disk error is logged."""
        mark = self._entries / check_revision(revision) / _PIN
        try:
            mark.touch() if pinned else mark.unlink(missing_ok=True)
        except OSError as e:
            log.warning("a pin could not be written", extra={"path": str(mark), "error": str(e)})

    # -- inside ------------------------------------------------------------------------------------

    def _default_budget(self) -> int:
        try:
            return (shutil.disk_usage(self._find_existing()).free + sum(e.nbytes for e in self.entries())) // 2
        except OSError:
            return 0

    def _find_existing(self) -> Path:
        return next(p for p in (self.root, *self.root.parents) if p.exists())

    def _records(self) -> list[tuple[float, EntryRecord]]:
        found = []
        for directory in model_directories(self._entries):
            record = self._record(directory)
            if record is not None:
                with contextlib.suppress(OSError):
                    found.append(((directory / ENTRY).stat().st_mtime, record))
        return found

    def _record(self, directory: Path) -> EntryRecord | None:
        try:
            record = EntryRecord.model_validate_json((directory / ENTRY).read_bytes())
        except (OSError, ValidationError):
            return None
        whole = all(size_of(directory / f.name) == f.size for f in record.files)
        return record if whole and record.revision == directory.name else None

    def _forget_status(self) -> None:
        with self._lock:
            self._seen = None
