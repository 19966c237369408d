"""Run the process that touches the host's memory while nothing is loaded."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from services.loader.domain import pretouch
from services.loader.domain.pretouch import Mode, Pretouch
from weights.pool.host_backing import Host

log = logging.getLogger(__name__)
_EXIT_S = 5.0
"""Time in which a killed process returns its memory."""
_OTHER_LOADER_S = 30.0


class Pretouching:
    """Touches memory once after boot. `run` is a task of the loader's event loop.

    Attributes:
        progress: For the status.
        command: The process; its arguments are the file that records the boot.
    """

    def __init__(self, mode: Mode, host: Host, marker: Path, clock: Callable[[], float] = time.monotonic) -> None:
        done = ""
        with suppress(OSError):
            done = marker.read_text().strip()
        self.progress: Pretouch = pretouch.begin(pretouch.reason_to_skip(mode, host, done))
        self.command = (sys.executable, "-m", "weights.pool.pretouch", str(marker))
        self._clock = clock
        self._process: Process | None = None
        self._loads = 0
        self._gone = threading.Event()
        self._gone.set()

    async def run(self, busy_at: Callable[[], float], changed: Callable[[], None]) -> None:
        """Touch memory whenever the loader is idle, until it is complete.

        Args:
            busy_at: Returns the monotonic seconds of the last moment with a load in progress.
            changed: Called when the status has changed.
        """
        if self.progress.reason:
            log.info("host memory is not touched", extra={"reason": self.progress.reason})
        try:
            while (wait := pretouch.wait_s(self.progress, self._clock(), busy_at())) is not None:
                if wait > 0:
                    await asyncio.sleep(wait)
                    continue
                await self._touch(changed)
                self.progress = pretouch.ended(self.progress, self._clock())
                changed()
        finally:
            self._kill()
        if self.progress.state == "complete":
            log.info("touched the host's free memory", extra={"bytes": self.progress.touched_bytes})

    def give_back(self) -> None:
        """End the process, and wait until its memory is free. Thread-safe; blocks.

        A load calls it before it measures free memory.
        """
        self._kill()
        if not self._gone.wait(_EXIT_S):
            log.warning("the process that touches memory has not ended")

    def _kill(self) -> None:
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):
                process.kill()

    async def _touch(self, changed: Callable[[], None]) -> None:
        self._gone.clear()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self.command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL
            )
            assert process.stdout is not None
            while line := await process.stdout.readline():
                with suppress(ValueError, KeyError):  # killed within a line
                    step = json.loads(line)
                    self.progress = pretouch.progressed(self.progress, step["touched_bytes"], step["verdict"], self._clock())
                    changed()
            await process.wait()
        except OSError as e:
            log.warning("failed to touch the host's memory", extra={"error": str(e)})
        finally:
            self._kill()
            self._process = None
            self._gone.set()
