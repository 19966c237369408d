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
from typing import Any

from services.loader.domain import pretouch
from services.loader.domain.pretouch import Mode, Pretouch
from weights.pool.host_backing import Host

log = logging.getLogger(__name__)
_STALLED_S = 10.0
"""Time without a step after which the process ends: the cores are busy, and it holds memory."""
_EXIT_S = 5.0
"""Time in which a killed process returns its memory."""


class Pretouching:
    """Touches memory once after boot. `run` is a task of the loader's event loop.

    Attributes:
        progress: For the status.
        command: The process; its arguments are the file that records the boot.
    """

    def __init__(self, mode: Mode, host: Host, marker: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._mode, self._host, self._marker, self._clock = mode, host, marker, clock
        self.progress: Pretouch = pretouch.begin(self._reason())
        self.command: tuple[str, ...] = (sys.executable, "-m", "weights.pool.pretouch", str(marker))
        self._process: Process | None = None
        self._halted = False
        self._gone = threading.Event()
        self._gone.set()

    def _reason(self) -> str | None:
        done = ""
        with suppress(OSError):
            done = self._marker.read_text().strip()
        return pretouch.reason_to_skip(self._mode, self._host, done)

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
                elif (reason := self._reason()) is not None:  # another loader of this machine has done it
                    self.progress = pretouch.begin(reason)
                else:
                    await self._touch(changed)
                    self.progress = pretouch.record_end(self.progress, self._clock())
                    changed()
        finally:
            self._kill()
        if self.progress.state == "complete":
            log.info("touched the host's free memory", extra={"bytes": self.progress.touched_bytes})

    def give_back(self) -> None:
        """End the process, and wait until its memory is free. Thread-safe; blocks.

        A load calls it before it measures free memory: the loop has recorded the load, so that no
        other process follows.
        """
        self._halted = True
        self._kill()
        if not self._gone.wait(_EXIT_S):
            log.warning("the process that touches memory has not ended")

    def _kill(self) -> None:
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):
                process.kill()

    async def _touch(self, changed: Callable[[], None]) -> None:
        self._gone.clear()
        self._halted = False
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self.command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL
            )
            if self._halted:
                process.kill()
            assert process.stdout is not None
            while line := await asyncio.wait_for(process.stdout.readline(), _STALLED_S):
                with suppress(ValueError):  # killed within a line
                    self._step(json.loads(line), changed)
        except TimeoutError:
            log.info("host memory is touched later: the cores are busy")
        except OSError as e:
            log.warning("failed to touch the host's memory", extra={"error": str(e)})
        finally:
            self._kill()
            if self._process is not None:
                await self._process.wait()
            self._process = None
            self._gone.set()

    def _step(self, line: dict[str, Any], changed: Callable[[], None]) -> None:
        before = self.progress
        self.progress = pretouch.record_progress(before, line["touched_bytes"], line["verdict"], self._clock())
        if self.progress.state != before.state:
            changed()
