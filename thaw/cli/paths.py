"""Paths of models as people write them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shared.model_paths import resolve_model
from thaw.errors import CommandError


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

    The file is complete or unchanged: an error in the block removes the draft. A pipe or a
    device is written directly.

    Raises:
        OSError: The file cannot be written.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    target = path.resolve()
    handle, draft = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        Path(draft).replace(target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
