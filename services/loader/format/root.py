"""Files of a model lie in its directory: a link that leads elsewhere is not followed."""

from __future__ import annotations

import os
from pathlib import Path

from shared.errors import CheckpointInvalid


def check_inside(directory: Path, path: Path) -> None:
    """Raises `CheckpointInvalid` if `path` leads out of `directory`.

    A model from elsewhere (an archive, a shared disk) could otherwise have any file of this host read and served. The directory itself may
    be a link. In the hub's cache the links of a snapshot lead to the blobs of the same repository; those are followed.
    """
    root, target = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    if target.is_relative_to(root):
        return
    if root.parent.name == "snapshots" and target.is_relative_to(root.parent.parent / "blobs"):
        return
    raise CheckpointInvalid(f"{path} is a link to {target}, outside {directory}: copy the file there, or name its own directory")
