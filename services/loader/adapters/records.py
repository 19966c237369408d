"""What a loader leaves for its successor: one small file for each complete segment, and a lock that says it is alive."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from services.loader.adapters.shm import read_segment_header, remove_segment, segments
from shared.contracts.base import Frozen
from shared.errors import Conflict

log = logging.getLogger(__name__)


class SegmentRecord(Frozen):
    """A complete segment and who holds it."""

    weights_id: str
    model: str
    segment: str
    directory: str
    total_bytes: int
    holders: tuple[str, ...]


class Records:
    """<node state>/loader: `segments/*.json`, written atomically, and `lock`."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._root, self._prefix = directory, prefix
        self._segments = directory / "segments"

    @contextmanager
    def sole(self) -> Iterator[None]:
        """Be the only loader of this node. Raises `Conflict` if there is one already: it would have its segments removed by us."""
        self._segments.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise Conflict(
                    f"another loader runs with {self._root}; stop it, or give this one another THAW_NODE or THAW_HOME"
                ) from e
            yield
        finally:
            os.close(fd)

    def write(self, record: SegmentRecord) -> None:
        """A fault of the disk is logged: serving goes on, and a restarted loader loads these weights again instead of adopting them."""
        path = self._path(record.segment)
        draft = path.with_suffix(".tmp")
        try:
            draft.write_text(record.model_dump_json())
            draft.replace(path)
        except OSError as e:
            log.error("a segment's record could not be written", extra={"path": str(path), "error": str(e)})
            with contextlib.suppress(OSError):
                draft.unlink()

    def remove(self, segment: str) -> None:
        self._path(segment).unlink(missing_ok=True)

    def recover(self) -> list[SegmentRecord]:
        """Complete, held segments of an earlier loader. Everything else of this node's, half-written or orphaned, is removed."""
        found = [r for r in (self._read(p) for p in sorted(self._segments.glob("*.json"))) if r is not None and _whole(r)]
        kept = {r.segment for r in found}
        for name in segments(self._prefix):
            if name not in kept:
                log.info("removed an unfinished or orphaned segment", extra={"segment": name})
                remove_segment(name, wait=0)
        for path in self._segments.iterdir():
            if path.suffix != ".json" or path.stem not in kept:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
        return found

    def _path(self, segment: str) -> Path:
        return self._segments / f"{segment}.json"

    def _read(self, path: Path) -> SegmentRecord | None:
        try:
            record = SegmentRecord.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as e:
            log.warning("dropped an unreadable segment record", extra={"file": str(path), "error": str(e)})
            return None
        ours = record.segment.startswith(self._prefix) and record.segment == path.stem
        return record if ours and record.holders else None


def _whole(record: SegmentRecord) -> bool:
    header = read_segment_header(record.segment)
    return header is not None and header.weights_id == record.weights_id and header.total_bytes == record.total_bytes
