"""Private directories, and files that survive a power cut.

A directory that another user can write or replace must hold neither a secret nor a socket: that
user reads the one and answers on the other. `make_private` and `require_private` refuse such a
directory instead of repairing it, since its content cannot be trusted either.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


class UntrustedDirectory(OSError):
    """A directory that another user could have made, or could change."""


def require_private(directory: Path, mode: int = 0o700) -> None:
    """Raise `UntrustedDirectory` unless only this user can write to `directory`.

    No other user may be able to replace it either.

    Args:
        directory: It must not be a symbolic link itself.
        mode: The most permissions it may have. 0o755 lets others read; more is then accepted below
            a directory that others cannot enter.
    """
    status = directory.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UntrustedDirectory(f"{directory} is a symbolic link")
    if not stat.S_ISDIR(status.st_mode):
        raise UntrustedDirectory(f"{directory} is not a directory")
    if status.st_uid != os.geteuid():
        raise UntrustedDirectory(f"{directory} belongs to user {status.st_uid}, not to user {os.geteuid()}")
    fault = None
    if status.st_mode & 0o777 & ~mode:
        fault = f"{directory} gives others too much access (mode {stat.S_IMODE(status.st_mode):04o})"
        if mode == 0o700:
            raise UntrustedDirectory(fault)
    require_safe_parents(directory, fault)


def require_safe_parents(path: Path, fault: str | None = None) -> None:
    """Raise `UntrustedDirectory` if another user can replace `path` or a parent of it.

    A parent may belong to this process's user or to root. A parent that others can write must be
    sticky, as /tmp is, or lie below a directory that only this user can enter.

    Args:
        fault: A fault of `path` itself that such a private parent also repairs.
    """
    ours = os.geteuid()
    for parent in path.absolute().parents:
        if not parent.exists():
            continue
        status = parent.stat()
        if status.st_uid == ours and not status.st_mode & 0o077:
            fault = None
        elif status.st_uid not in (ours, 0):
            fault = f"{parent}, above {path}, belongs to user {status.st_uid}"
        elif status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            fault = f"{parent}, above {path}, can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    if fault is not None:
        raise UntrustedDirectory(fault)


def make_private(directory: Path, mode: int = 0o700) -> None:
    """Create `directory` and missing parents, then check it with `require_private`.

    Raises:
        OSError: A directory cannot be created.
    """
    missing = [directory]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for made in reversed(missing):
        with contextlib.suppress(FileExistsError):
            made.mkdir(mode=mode)
    require_private(directory, mode)


def write_durably(path: Path, data: bytes | bytearray, mode: int = 0o600) -> None:
    """Replace `path` with `data` atomically, also through a power cut.

    The bytes are synced before the rename, and the directory after it.

    Raises:
        OSError: The write failed.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(handle, mode)
            os.fsync(handle)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Put the directory's entries on the disk. Raises `OSError`."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
