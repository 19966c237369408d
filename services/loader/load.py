"""Load a model directory into a shared-memory segment, without any mesh: what the loader service runs, and benches and tests call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.loader.adapters.reader import ReadStats, read_files
from services.loader.adapters.shm import SegmentWriter
from services.loader.format.checkpoint import open_checkpoint
from services.loader.format.segment import Layout, lay_out


@dataclass(frozen=True)
class LoadReport:
    """One load: `seconds` from the call's start to the last byte, `read_seconds` of it spent on the weight files."""

    segment: str
    total_bytes: int
    seconds: float
    read_seconds: float
    stats: ReadStats

    @property
    def bytes_per_second(self) -> float:
        return self.total_bytes / max(self.read_seconds, 1e-9)


def load_segment(
    directory: Path | str,
    name: str,
    threads: int = 4,
    *,
    weights_id: str = "",
    cancelled: threading.Event | None = None,
    on_layout: Callable[[Layout], None] | None = None,
    on_index: Callable[[Layout], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> LoadReport:
    """Load the checkpoint in `directory` into the new segment /dev/shm/`name`; the caller removes it (`shm.remove_segment`).

    `on_layout` may object (raise) before any memory is taken; `on_index` is called when readers may map the segment; `on_bytes(n)` from
    the reading threads. Raises `CheckpointInvalid`, `InsufficientMemory` or `Cancelled`, and then leaves no segment behind.
    """
    started = time.monotonic()
    layout = lay_out(open_checkpoint(Path(directory)), weights_id or name)
    if on_layout is not None:
        on_layout(layout)
    writer = SegmentWriter(name, layout.total_bytes)
    complete = False
    try:
        writer.write(0, layout.head)
        if on_index is not None:
            on_index(layout)
        reading = time.monotonic()
        stats = read_files(layout.places, writer, threads=threads, cancelled=cancelled, on_bytes=on_bytes)
        complete = True
    finally:
        writer.close(unlink=not complete)
    ended = time.monotonic()
    return LoadReport(name, layout.total_bytes, ended - started, ended - reading, stats)
