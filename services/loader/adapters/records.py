"""Store the state that survives a restart of the loader: the pool, records of complete weights, and
a lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, ValidationError

from shared.contracts.base import Frozen
from shared.contracts.segment import HEADER_BYTES, LAYOUT_VERSION, MAGIC, SegmentHeader
from shared.errors import Conflict
from shared.restart_records import recover_records, write_record
from weights.pool.chunks import CHUNK_BYTES, parts
from weights.pool.memory import PoolMemory
from weights.pool.region import extents
from weights.pool.shm import SHM, segments
from weights.store.generations import is_page_file

log = logging.getLogger(__name__)


class WeightsRecord(Frozen):
    """Complete weights: their chunks of the pool, and the instances that hold them.

    Without such an instance the weights are cached.
    """

    weights_id: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    model: str
    chunks: tuple[int, ...]
    chunk_bytes: int = CHUNK_BYTES
    directory: str
    total_bytes: int
    holders: tuple[str, ...]
    source: str = ""
    pinned: bool = False


class Records:
    """The files of <node state>/loader: `weights/*.json`, and `lock`."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._root, self.prefix = directory, prefix
        self._weights = directory / "weights"

    @property
    def pool_name(self) -> str:
        return f"{self.prefix}pool"

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Lock the state, so that this loader is the only one of its node.

        Raises:
            Conflict: Another loader runs with this state, and this one would take its memory.
        """
        self._weights.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise Conflict(
                    f"Another loader runs with {self._root}; stop it, or give this one another THAW_NODE or THAW_HOME"
                ) from e
            yield
        finally:
            os.close(fd)

    def write(self, record: WeightsRecord) -> None:
        """Write a record.

        A disk error is only logged: serving continues, and a restarted loader loads these weights
        again.
        """
        path = self._path(record.weights_id)
        try:
            write_record(path, record.model_dump_json())
        except OSError as e:
            log.error("failed to write a weights record", extra={"path": str(path), "error": str(e)})

    def remove(self, weights_id: str) -> None:
        """Remove a record, whose memory is freed next. A disk error is only logged."""
        _remove(self._path(weights_id))

    def recover(self, pool: PoolMemory) -> tuple[list[WeightsRecord], tuple[int, ...]]:
        """Recover the pool and the records of an earlier loader.

        The memory of all other chunks is freed, and the earlier loader's other files are removed.

        Returns:
            The records of complete weights, and the chunks without an owner that some process still
            maps.
        """
        try:
            recover_records(self._weights)
        except OSError as e:
            log.error("failed to recover weights records", extra={"path": str(self._weights), "error": str(e)})
        found: list[WeightsRecord] = []
        owned: set[int] = set()
        for path in sorted(self._weights.glob("*.json")):
            record = self._read(path)
            if record is not None and owned.isdisjoint(record.chunks) and _is_whole(record, pool):
                found.append(record)
                owned.update(record.chunks)
        mapped = tuple(sorted(set(pool.mapped_by_others()) - owned))
        kept = owned.union(mapped)
        pool.punch(c for c in range(pool.count) if c not in kept)
        for name in segments(self.prefix):
            if name != self.pool_name and not is_page_file(name, self.prefix):
                log.info("removed a file of an earlier loader", extra={"file": name})
                (SHM / name).unlink(missing_ok=True)
        names = {self._path(r.weights_id).name for r in found}
        for path in self._weights.iterdir():
            if path.name not in names:
                _remove(path)
        return found, mapped

    def _path(self, weights_id: str) -> Path:
        return self._weights / f"{weights_id}.json"

    def _read(self, path: Path) -> WeightsRecord | None:
        try:
            record = WeightsRecord.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as e:
            log.warning("dropped an unreadable weights record", extra={"file": str(path), "error": str(e)})
            return None
        return record if record.weights_id == path.stem else None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        log.error("failed to remove a weights record", extra={"path": str(path), "error": str(e)})


def _is_whole(record: WeightsRecord, pool: PoolMemory) -> bool:
    fits = record.chunk_bytes == CHUNK_BYTES and len(record.chunks) == len(parts(record.total_bytes)) > 0
    if not fits or len(set(record.chunks)) != len(record.chunks) or not all(0 <= c < pool.count for c in record.chunks):
        return False
    raw = os.pread(pool.fd, HEADER_BYTES, record.chunks[0] * CHUNK_BYTES)
    try:
        header = SegmentHeader.model_validate_json(raw.rstrip(b"\0"))
    except ValidationError:
        return False
    current = header.magic == MAGIC and header.version == LAYOUT_VERSION
    if not all(pool.has_memory(e.offset, e.nbytes) for e in extents(record.chunks, record.total_bytes)):
        return False
    return current and header.weights_id == record.weights_id and header.total_bytes == record.total_bytes
