"""Read a model from a directory on this host.

The directory is the model's own, a snapshot of the hub's cache, or an entry of the SSD cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISDIR

from shared.errors import CheckpointInvalid, InvalidModel
from weights.formats.checkpoint import directory_revision, open_every_rank, read_small
from weights.formats.inspect import CONFIG
from weights.formats.lora_adapter import CONFIG as ADAPTER_CONFIG
from weights.formats.root import check_inside, expand_user, mode_of
from weights.tiers.names import limit_of, select
from weights.tiers.port import Cancelled, TierFile

_PIECE_BYTES = 4 * 1024 * 1024


class DirectoryTier:
    """A model in a directory on this host.

    Args:
        directory: The directory.
        source: The remote source that the directory is a copy of; None: the directory itself.
        revision: The source's revision; None: that of the directory's files.
    """

    def __init__(self, directory: Path, *, source: str | None = None, revision: str | None = None) -> None:
        self._path = directory
        self.source = source or str(directory)
        self._revision = revision
        self._files: list[TierFile] | None = None
        self._settled = threading.Event()
        self._settled.set()

    @classmethod
    def open_source(cls, source: str) -> DirectoryTier:
        """Open the tier of the directory `source`.

        Raises:
            InvalidModel: `source` is not an absolute path.
            CheckpointInvalid: There is no directory.
        """
        directory = expand_user(source)
        if not directory.is_absolute():
            raise InvalidModel(
                f"{source} is neither an absolute directory nor hf://org/name[@revision], https://…, s3://…, gs://… or az://…",
                param="source",
            )
        mode = mode_of(directory)
        if mode is None:
            raise CheckpointInvalid(f"{directory} does not exist on this node; copy the model there or correct its source")
        if not S_ISDIR(mode):
            raise CheckpointInvalid(f"{directory} is not a directory; source is the directory that holds config.json")
        return cls(directory.resolve())

    @property
    def directory(self) -> Path:
        return self._path

    @property
    def link(self) -> str:
        return f"ssd:{disk_of(self._path)}"

    @property
    def revision(self) -> str:
        if self._revision is None:
            checkpoint = open_every_rank(self._path)
            adapter = mode_of(self._path / CONFIG) is None and mode_of(self._path / ADAPTER_CONFIG) is not None
            self._revision = directory_revision(checkpoint, read_small(self._path / (ADAPTER_CONFIG if adapter else CONFIG)))
        return self._revision

    def files(self) -> Sequence[TierFile]:
        if self._files is None:
            sizes = {p.relative_to(self._path).as_posix(): found for p, found in _regular_files(self._path)}
            names = select(
                {n: s.st_size for n, s in sizes.items()}, str(self._path), lambda n: read_small(self._path / n, limit_of(n))
            )
            self._files = [TierFile(n, sizes[n].st_size, f"{sizes[n].st_mtime_ns}-{sizes[n].st_ino}") for n in names]
        return self._files

    def read(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> None:
        path = self._path / file.name
        check_inside(self._path, path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise CheckpointInvalid(f"{path} cannot be read: {e.strerror}; check its permissions and the disk") from e
        try:
            stat = os.fstat(fd)
            if file.version and f"{stat.st_mtime_ns}-{stat.st_ino}" != file.version:
                raise CheckpointInvalid(f"{path} has changed since it was listed; register the model again (thaw models add)")
            _fill(fd, path, offset, into, cancelled)
        except OSError as e:
            raise CheckpointInvalid(f"{path} cannot be read: {e.strerror}; check its permissions and the disk") from e
        finally:
            os.close(fd)

    def finish(self, cancelled: threading.Event | None = None) -> None:
        """No-op: local files were verified on arrival, or are the operator's own."""

    def get_settled_event(self) -> threading.Event:
        return self._settled

    def close(self) -> None:
        """Do nothing: no file is open between reads."""


def _fill(fd: int, path: Path, offset: int, into: memoryview, cancelled: threading.Event | None) -> None:
    done = 0
    while done < len(into):
        if cancelled is not None and cancelled.is_set():
            raise Cancelled
        with into[done : done + _PIECE_BYTES] as piece:
            got = os.preadv(fd, [piece], offset + done)
        if got == 0:
            raise CheckpointInvalid(f"{path} is shorter than it was; wait until it is written, then register the model again")
        done += got


def _regular_files(directory: Path) -> list[tuple[Path, os.stat_result]]:
    """Return the regular files, two levels deep, with their status."""
    try:
        top = list(directory.iterdir())
        below = [p for d in top if d.is_dir() and not d.name.startswith(".") for p in d.iterdir()]
        return [(p, p.stat()) for p in (*top, *below) if p.is_file()]
    except OSError as e:
        raise CheckpointInvalid(
            f"{directory} cannot be listed: {e.strerror}; give the loader's user access, and repeat if files were being removed"
        ) from e


def disk_of(path: Path) -> str:
    """Return the name of `path`'s block device, as nvme0n1.

    File systems without one (network, memory) have a device number instead.
    """
    number = path.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    try:
        found = Path(f"/sys/dev/block/{name}").resolve(strict=True)
    except OSError:
        return name
    return found.parent.name if (found / "partition").exists() else found.name
