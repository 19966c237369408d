"""Files in which a process leaves its state to its successor on the same machine.

They survive the death of the process at any moment, but not a power cut: what they describe, such
as processes and shared memory, does not survive that either.

A rename over an existing file makes ext4 allocate the new file's blocks at once, and an event loop
stands still meanwhile: see docs/performance.md. A rename to a free name does not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

_DRAFT = ".new"


def write_record(path: Path, text: str) -> None:
    """Replace a JSON file, so that `recover_records` finds the earlier text or this one.

    Raises:
        OSError: The new text could not be written, and the earlier one is kept; or the file could
            not be renamed, and `recover_records` finds the new text.
    """
    draft = path.with_name(path.name + _DRAFT)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    path.unlink(missing_ok=True)
    draft.rename(path)


def recover_records(directory: Path) -> None:
    """Complete the replacements that an earlier process has begun in a directory, or undo them.

    Raises:
        OSError: A file cannot be read or renamed.
    """
    for draft in directory.glob(f"*.json{_DRAFT}"):
        path = draft.with_name(draft.name.removesuffix(_DRAFT))
        if path.exists() or not _is_complete(draft):
            draft.unlink(missing_ok=True)
        else:
            draft.rename(path)


def _is_complete(draft: Path) -> bool:
    try:
        json.loads(draft.read_bytes())
    except ValueError:
        return False
    return True
