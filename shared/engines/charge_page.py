"""A file in which an engine keeps its meters, for its nodeagent to read when it was killed.

The engine maps the file into memory and writes to it after each step. What it wrote stays in the
page cache when its process ends, so that the nodeagent knows more than the last report had
(docs/adr/0101).
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from pathlib import Path

from shared.contracts.engine import EngineStart
from shared.engines.final_charges import FinalCharges

log = logging.getLogger(__name__)
_PID = struct.Struct("=q")
_STEPS = struct.Struct("=3d")
_UNMETERED = struct.Struct("=d")
_STEPS_AT = _PID.size
_UNMETERED_AT = _STEPS_AT + _STEPS.size
_BYTES = _UNMETERED_AT + _UNMETERED.size


class ChargePage:
    """The writer's side of the file. One thread writes the steps, and another one the rest."""

    def __init__(self, path: Path) -> None:
        """Create the file in the place of an earlier one. Raises `OSError`."""
        draft = path.with_suffix(f"{path.suffix}.new")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, _PID.pack(os.getpid()).ljust(_BYTES, b"\0"))
            self._map = mmap.mmap(descriptor, _BYTES)
        finally:
            os.close(descriptor)
        draft.replace(path)

    def write_steps(self, busy_s: float, charged_s: float, own_s: float) -> None:
        """Write the meters of the steps; fields as in `FinalCharges`."""
        _STEPS.pack_into(self._map, _STEPS_AT, busy_s, charged_s, own_s)

    def write_unmetered(self, seconds: float) -> None:
        """Write the part of the requests' seconds that counts as work for no request."""
        _UNMETERED.pack_into(self._map, _UNMETERED_AT, seconds)


def open_page(start: EngineStart) -> ChargePage | None:
    """Create the file that the nodeagent asks for; None: it asks for none, or it cannot be made."""
    if start.charges_path is None:
        return None
    try:
        return ChargePage(Path(start.charges_path))
    except OSError as e:
        log.warning("failed to create the file of meters", extra={"path": start.charges_path, "error": str(e)})
        return None


def read_charges(path: Path, pid: int) -> FinalCharges | None:
    """Return what an ended process wrote; None: it wrote nothing, or another one did."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _BYTES or _PID.unpack_from(data)[0] != pid:
        return None
    busy_s, charged_s, own_s = _STEPS.unpack_from(data, _STEPS_AT)
    (unmetered_s,) = _UNMETERED.unpack_from(data, _UNMETERED_AT)
    return FinalCharges(busy_s, max(0.0, charged_s - unmetered_s), own_s + unmetered_s)
