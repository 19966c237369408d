"""The paths of a model that its engine's container needs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from shared.model_paths import GGUF_SUFFIX, shards_of


def model_mounts(source: Path, others: Collection[str] = ()) -> list[str]:
    """Return read-only binds of a model's files, each at its own path.

    The container engine follows the links of a path that it binds, but not those inside a
    directory. In the hub's cache the files of a snapshot are links to blobs: those that it names
    are bound too. Other links are not followed: a model could name any file of the host.

    Args:
        others: Binds of the operator's, which may list a part of the model. The container engine
            refuses two binds at one path.
    """
    paths = [source]
    if source.suffix == GGUF_SUFFIX:
        # A bind creates a path that does not exist, as a directory on the host.
        paths += [shard for shard in shards_of(source) if shard != source and shard.exists()]
    paths += sorted(set(_blobs_of(source)))
    taken = {bind.split(":")[1] for bind in others}
    return [f"{path}:{path}:ro" for path in paths if str(path) not in taken]


def _blobs_of(directory: Path) -> Iterator[Path]:
    """Yield the blobs to which files in a directory of the hub's cache are links."""
    blobs = next((p.parent / "blobs" for p in directory.parents if p.name == "snapshots"), None)
    for parent, _, files in os.walk(directory) if blobs is not None else ():
        for link in (Path(parent, name) for name in files):
            if link.is_symlink():
                target = Path(os.path.normpath(link.parent / link.readlink()))
                if target.parent == blobs and target.is_file() and not target.is_symlink():
                    yield target
