"""Resolve paths of models, and reject links out of the model's directory."""

from __future__ import annotations

import os
from pathlib import Path

from shared.errors import CheckpointInvalid


def mode_of(path: Path) -> int | None:
    """Return `st_mode` of `path`; None if it does not exist.

    Raises `CheckpointInvalid` if that cannot be determined.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # or it has a zero byte
        return None
    except OSError as e:  # no access on the way to it, a name too long, links in a circle
        raise CheckpointInvalid(
            f"{path} cannot be looked at: {e.strerror}; correct the path, or the permissions on the way to it"
        ) from e


def expand_user(path: Path | str) -> Path:
    """Return `path` with `~` replaced. Raises `CheckpointInvalid` for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as e:
        raise CheckpointInvalid(f"{path} begins with the home of an unknown user; write the directory in full") from e


def check_inside(directory: Path, path: Path) -> None:
    """Raises `CheckpointInvalid` if `path` leads out of `directory`.

    A model from elsewhere (an archive, a shared disk) could otherwise have any file of this host
    read and served. The directory itself may be a link. In the hub's cache the links of a snapshot
    lead to the blobs of the same repository; those are followed.
    """
    root, target = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    if target.is_relative_to(root):
        return
    if root.parent.name == "snapshots" and target.is_relative_to(root.parent.parent / "blobs"):
        return
    raise CheckpointInvalid(f"{path} is a link to {target}, outside {directory}: copy the file there, or name its own directory")
