"""The memory of a separate device, as `thaw ps --memory` shows it."""

from __future__ import annotations

from typing import Any

from tests.support.launcher import Thaw, until
from weights.store.units import PAGE_BYTES

_STATES = ("free", "mapped", "reusable", "lent")


def read_memory(mesh: Thaw, device: str) -> dict[str, Any]:
    """Return the latest status of a device of node-0, whose states are all of its memory."""
    [node] = mesh.json("ps", "--memory")["nodes"]
    [found] = [d for d in node["loader"]["memory"] if d["device_id"] == device]
    assert sum(found[f"{state}_bytes"] for state in _STATES) == found["total_bytes"]
    return dict(found)


def await_memory(mesh: Thaw, device: str) -> dict[str, Any]:
    """Return the status of a device, once it is as new as an audit of its loader.

    On a busy machine the scheduler receives a loader's status later than a client its response.
    """
    found: dict[str, Any] = {}

    def is_current() -> bool:
        audits = [a for a in mesh.json("doctor")["audits"]["node-0"] if a["device_id"] == device]
        found.clear()
        found.update(read_memory(mesh, device))
        # A loader that does not run may answer too late.
        return bool(audits) and all(found[f"{state}_bytes"] == audits[0][f"{state}_pages"] * PAGE_BYTES for state in _STATES)

    until(is_current, what=lambda: f"the status of {device} is that of its loader: {found}")
    return found
