"""Explain disk errors with their remedies, and create directories atomically."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import Conflict, ThawError, Unavailable

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def disk_error(path: Path, e: OSError) -> ThawError:
    """`e`, met while `path` was written, as an error that says what to do."""
    if e.errno in _FULL:
        return Unavailable(f"{path} could not be written: {e.strerror}; free some space or name another disk, and convert again")
    if e.errno == errno.ENAMETOOLONG:
        return Unavailable(f"{path} could not be written: {e.strerror}; choose a shorter name")
    if e.errno in (errno.EMFILE, errno.ENFILE):
        return Unavailable(
            f"{path} could not be written: {e.strerror}; each rank has one: raise the limit (ulimit -n), or choose fewer ranks"
        )
    if e.errno in _FORBIDDEN:
        return Unavailable(f"{path} could not be written: {e.strerror}; name a directory that you may write to")
    return Unavailable(f"{path} could not be written: {e.strerror}; check the disk")


def check_room(directory: Path, nbytes: int) -> None:
    """Raises `Unavailable` if the disk of `directory` has not `nbytes` free."""
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if nbytes > free:
        raise Unavailable(
            f"The converted weights take about {nbytes / 1e9:.2f} GB and the disk of {directory} has {free / 1e9:.2f} GB free: free some "
            "space or name another disk"
        )


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """Create a directory beside `destination` and rename it when the block ends.

    The rename is durable. If the block raises, the directory is removed. A process killed in the
    block leaves the directory, under a name that is no model's; the next conversion to the same
    destination removes it.

    Raises:
        Conflict: `destination` exists, or another process is converting to it.
    """
    draft = destination.parent / f".{destination.name}.converting"
    _check_free(destination)
    fd = _claim(draft, destination)
    try:
        try:
            _clear(draft)
            yield draft
            _publish(draft, destination)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    finally:
        os.close(fd)


def _check_free(destination: Path) -> None:
    try:
        taken = os.path.lexists(destination) and (
            not destination.is_dir() or destination.is_symlink() or any(destination.iterdir())
        )
    except OSError as e:
        raise disk_error(destination, e) from e
    if taken:
        raise Conflict(f"{destination} is there already; remove it or name another directory")


def _claim(draft: Path, destination: Path) -> int:
    """Return a descriptor of `draft` that holds its lock.

    The kernel releases the lock of a process that died.
    """
    try:
        draft.mkdir(exist_ok=True)
        fd = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as e:
        if destination.parent.is_dir():  # as in /proc, whose file system makes no directories
            raise Unavailable(f"No directory can be made in {destination.parent}; name one on a disk") from e
        raise Unavailable(f"{destination.parent} does not exist; make it first") from e
    except NotADirectoryError as e:
        raise Unavailable(f"{destination} would be below a file; name a directory") from e
    except OSError as e:
        raise disk_error(draft, e) from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between the opening and the lock another process may have finished with it.
        if os.path.samestat(os.fstat(fd), draft.lstat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    raise Conflict(f"Another process is converting to {destination}; wait for it, or name another directory")


def _clear(draft: Path) -> None:
    try:
        for path in draft.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as e:
        raise disk_error(draft, e) from e


def _publish(draft: Path, destination: Path) -> None:
    try:
        for directory, _, _ in os.walk(draft):
            sync(Path(directory))
        draft.rename(destination)
        sync(destination.parent)
    except OSError as e:
        if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise Conflict(f"{destination} has appeared meanwhile; name another directory") from e
        raise disk_error(destination, e) from e


def write_file(path: Path, data: bytes) -> None:
    """A new file with its bytes on the disk.

    Raises what `disk_error` makes of a failure.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise disk_error(path, e) from e


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
