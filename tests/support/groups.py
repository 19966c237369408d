"""Control groups that tests create, removed after them."""

from __future__ import annotations

import contextlib
import time

from services.nodeagent.suspend.cgroups import hierarchies

_WITHIN_S = 10.0
_POLL_S = 0.02


def remove_groups(prefix: str) -> None:
    """Remove groups named `thaw-PREFIX…` whose processes were killed.

    Waits for processes that have not exited yet.
    """
    deadline = time.monotonic() + _WITHIN_S
    roots = [root for _, root in hierarchies()]
    while left := [d for root in roots for d in root.glob(f"thaw-{prefix}*")]:
        for directory in left:
            with contextlib.suppress(OSError):
                directory.rmdir()
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)
