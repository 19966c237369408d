"""Open files of the tests' process."""

from __future__ import annotations

import contextlib
from pathlib import Path


def open_files() -> set[tuple[str, str]]:
    """Return the number of each descriptor, and what it refers to.

    A later result has what was opened meanwhile, and lacks what was closed: the collection of
    garbage may close files of earlier tests at any time.
    """
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the directory that is being listed
            found.add((entry.name, str(entry.readlink())))
    return found
