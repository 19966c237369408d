"""Files with the start of an engine process, which have credentials.

The nodeagent writes one for each process that no zygote forks, and names it in the command line.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shared.processes import all_pids


def take_start_file(path: Path) -> bytes:
    """Return the content of this process's start, and remove the file.

    Raises:
        OSError: The file cannot be read.
    """
    content = path.read_bytes()
    with contextlib.suppress(OSError):  # the nodeagent removes it later
        path.unlink()
    return content


def remove_stale_start_files(directory: Path) -> None:
    """Remove the files whose processes have ended. Blocking.

    A process that has only begun may have to read its own.
    """
    paths = list(directory.glob("*.json"))
    if not paths:
        return
    named: set[bytes] = set()
    for pid in all_pids():
        with contextlib.suppress(OSError):
            named.update(argument.rpartition(b"/")[2] for argument in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    for path in paths:
        if os.fsencode(path.name) not in named:
            with contextlib.suppress(OSError):
                path.unlink()
