"""A zygote whose engines wait before each step, as for a device that is slower than this one.

It is started as `python -m tests.support.paced_zygote SOCKET`. The builtin engine computes several
hundred tokens of a small model in a second, and keeps a core busy. A stream that has to last for
some seconds, while processes are stopped and killed around it, takes a fraction of the CPU time if
the engine waits. `Pace` changes the wait while engines run: a stream lasts until the test has seen
what it waits for, however busy the machine is, and then ends soon.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

_STEP, _FILE, _START = "THAW_TEST_STEP_S", "THAW_TEST_STEP_FILE", "THAW_TEST_START_S"
"""Environment of engines: seconds before each step, or a file that has them; seconds of a start."""
MODULE: Final = "tests.support.paced_zygote"
SLOW_STEP_S: Final = 0.1
_PAUSE_S = "10"
"""Longest expected pause of a migration, whose last round takes a step or two: on a busy machine no
round is too slow.
"""


def slowed_by(step_s: float) -> dict[str, str]:
    """Return the environment of a mesh whose engines wait for `step_s` seconds before each step."""
    return {"THAW_ZYGOTE_MODULE": MODULE, _STEP: str(step_s), "THAW_MIGRATE_PAUSE": _PAUSE_S}


def with_slow_starts(start_s: float) -> dict[str, str]:
    """Return the environment of a mesh whose engines take `start_s` seconds longer to start.

    A small model starts in about the time in which it resumes; the mesh uses what is faster, and
    stops an instance that resumes no faster.
    """
    return {"THAW_ZYGOTE_MODULE": MODULE, _START: str(start_s)}


class Pace:
    """The wait of engines, which is none until a test slows them down."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "step_s"
        self.environment = {"THAW_ZYGOTE_MODULE": MODULE, _FILE: str(self._file), "THAW_MIGRATE_PAUSE": _PAUSE_S}
        """Of a mesh, or of one engine whose zygote is this module."""

    @contextlib.contextmanager
    def slowed(self, step_s: float = SLOW_STEP_S) -> Iterator[None]:
        """Make all engines wait for `step_s` seconds before each step, until the block ends."""
        self.change(step_s)
        try:
            yield
        finally:
            self._file.unlink()

    def change(self, step_s: float) -> None:
        """Make them wait for `step_s` seconds instead, inside a block of `slowed`."""
        draft = self._file.with_suffix(".new")
        draft.write_text(str(step_s))
        draft.rename(self._file)


def _wait_s() -> float:
    if file := os.environ.get(_FILE):
        try:
            return float(Path(file).read_text())
        except FileNotFoundError:
            return 0.0
    return float(os.environ.get(_STEP, "0"))


def _paced(forward: Callable[..., Any]) -> Callable[..., Any]:
    def after_a_wait(runner: Any, rows: Sequence[Any]) -> Any:
        if wait_s := _wait_s():
            time.sleep(wait_s)
        return forward(runner, rows)

    return after_a_wait


def _after_a_wait(read: Callable[..., Any], start_s: float) -> Callable[..., Any]:
    def after_a_wait(*args: Any) -> Any:
        time.sleep(start_s)
        return read(*args)

    return after_a_wait


def main() -> int:
    from services.engine import app, zygote
    from services.engine.generation.runner import PackedRunner
    from services.engine.kv_transfer import destination, exchange
    from services.engine.stages.first_stage import FirstStageRunner

    # A busy machine computes what it cannot transfer in time; tests count what is transferred.
    destination.CONNECT_WITHIN_S, exchange.REST_WITHIN_S = 30.0, 5.0

    PackedRunner.forward = _paced(PackedRunner.forward)  # type: ignore[method-assign]
    FirstStageRunner.forward = _paced(FirstStageRunner.forward)  # type: ignore[method-assign]
    if start_s := os.environ.get(_START):
        # Phase `init`, of which the scheduler takes a sample of 2 s at most.
        vars(app)["read_files"] = _after_a_wait(vars(app)["read_files"], float(start_s))
    return zygote.main()


if __name__ == "__main__":
    sys.exit(main())
