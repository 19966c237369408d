"""Paths of models as people write them."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shared.model_paths import resolve_model
from thaw.errors import CommandError

_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_OUTPUTS = {"/dev/stdout": 1, "/dev/stderr": 2}


def program() -> str:
    """Return the user's name for this command line.

    It is `thaw` if the shell finds it, else the path of the call.
    """
    called = Path(sys.argv[0])
    found = shutil.which("thaw")
    if called.name != "thaw" or (found is not None and Path(found).absolute() == called.absolute()):
        return "thaw"
    path = called.absolute()
    below = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return str(below) if os.access(path, os.X_OK) else "thaw"


def local_path(written: str | Path) -> Path:
    """Return the path in full, links unresolved.

    Raises:
        CommandError: `~` of an unknown user.
    """
    try:
        return Path(written).expanduser().absolute()
    except RuntimeError as e:
        raise CommandError(f"{written} begins with the home of an unknown user.", "Write the directory in full.") from e


def model_directory(written: str) -> Path | None:
    """Return the directory or .gguf file, links resolved; None if there is none.

    Raises:
        CommandError: The file system gives no answer.
    """
    path = local_path(written)
    try:
        path = resolve_model(path)
        return path if path.is_dir() or (path.suffix == ".gguf" and path.is_file()) else None
    except (OSError, RuntimeError) as e:  # no access on the way to it, a name too long, links in a circle
        why = e.strerror if isinstance(e, OSError) else "links in a circle"
        raise CommandError(f"{path} cannot be looked at: {why}.", "Correct the path, or the permissions on the way to it.") from e


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Open a draft of a file, which takes its place at the end of the block.

    The file is complete or unchanged: an error in the block removes the draft. The draft has the
    mode and the owner of the file that it replaces. A file is written in place if the user may not
    create such a draft, and so are pipes and devices.

    Raises:
        OSError: The file cannot be written.
    """
    if str(path) in _OUTPUTS:  # also where the shell appends to a file
        with os.fdopen(os.dup(_OUTPUTS[str(path)]), "wb") as file:
            yield file
        return
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    opened = _open_draft(draft, path)
    if opened is None:
        with path.open("wb") as file:
            yield file
        return
    try:
        with opened as file:
            yield file
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _open_draft(draft: Path, path: Path) -> BinaryIO | None:
    """Create a draft with the mode and owner of `path`; None to write `path` in place."""
    try:
        before = path.stat()
    except FileNotFoundError:
        return draft.open("xb")
    if not stat.S_ISREG(before.st_mode):
        return None
    path.open("r+b").close()  # a write-protected file is refused
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno not in _NO_ACCESS:
            raise
        return None
    try:
        created = os.fstat(descriptor)
        if (created.st_uid, created.st_gid) != (before.st_uid, before.st_gid):
            os.fchown(descriptor, before.st_uid, before.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
    except OSError:
        os.close(descriptor)
        draft.unlink(missing_ok=True)
        return None
    return os.fdopen(descriptor, "wb")
