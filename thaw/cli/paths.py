"""Paths of models as people write them."""

from __future__ import annotations

from pathlib import Path

from thaw.errors import CommandError


def local_path(written: str | Path) -> Path:
    """In full, links left as they are. Raises `CommandError` for `~` of a user whom nobody knows."""
    try:
        return Path(written).expanduser().absolute()
    except RuntimeError as e:
        raise CommandError(f"{written} begins with the home of an unknown user.", "Write the directory in full.") from e


def model_directory(written: str) -> Path | None:
    """The directory, or .gguf file, that is meant, links followed; None: there is none. Raises `CommandError` where that cannot be told."""
    path = local_path(written)
    try:
        path = path.resolve()
        return path if path.is_dir() or (path.suffix == ".gguf" and path.is_file()) else None
    except (OSError, RuntimeError) as e:  # no access on the way to it, a name too long, links in a circle
        why = e.strerror if isinstance(e, OSError) else "links in a circle"
        raise CommandError(f"{path} cannot be looked at: {why}.", "Correct the path, or the permissions on the way to it.") from e
