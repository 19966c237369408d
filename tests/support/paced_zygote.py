"""A zygote whose engines wait before each step, as for a device that is slower than this one.

It is started as `python -m tests.support.paced_zygote SOCKET`. The builtin engine computes several
hundred tokens of a small model in a second, and keeps a core busy. A stream that has to last for
some seconds, while processes are stopped and killed around it, takes a fraction of the CPU time if
the engine waits. `Pace` changes the wait while engines run, or holds them: a stream lasts until the
test has seen what it waits for, however busy the machine is, and then ends soon.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

_STEP, _FILE, _START = "THAW_TEST_STEP_S", "THAW_TEST_STEP_FILE", "THAW_TEST_START_S"
"""Environment of engines: seconds before each step, or a file that has them; seconds of a start."""
MODULE: Final = "tests.support.paced_zygote"
SLOW_STEP_S: Final = 0.1
_HELD: Final = "held"
_HELD_S, _POLL_S = 60.0, 0.005
"""Longest wait of a held step, and time between two looks for a command."""
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


_batchers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Batchers of this process that have computed."""


class Pace:
    """The wait of engines, which is none until a test slows them down."""

    def __init__(self, directory: Path, name: str = "step_s") -> None:
        """Create it.

        Args:
            directory: Of the file that engines read.
            name: Of that file.
        """
        self._file = directory / name
        self.environment = {"THAW_ZYGOTE_MODULE": MODULE, _FILE: str(self._file), "THAW_MIGRATE_PAUSE": _PAUSE_S}
        """Environment of a mesh, or of one engine whose zygote is this module."""

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
        self._write(str(step_s))

    def hold(self) -> None:
        """Make them wait for a command before each step, inside a block of `slowed`.

        A request that is read, or whose keys and values are, gains a token with each command, and
        so lasts for as long as the test takes.
        """
        self._write(_HELD)

    def _write(self, text: str) -> None:
        draft = self._file.with_suffix(".new")
        draft.write_text(text)
        draft.rename(self._file)


def wait_before_step() -> float:
    """Return the seconds that this process has to wait before each step; it is not held."""
    return float(_read_pace())


def _read_pace() -> str:
    if file := os.environ.get(_FILE):
        try:
            return Path(file).read_text()
        except FileNotFoundError:
            return "0"
    return os.environ.get(_STEP, "0")


def _wait_for_command() -> None:
    until = time.monotonic() + _HELD_S
    while not any(batcher.has_commands() for batcher in _batchers):
        if time.monotonic() > until or _read_pace() != _HELD:
            return
        time.sleep(_POLL_S)


def _paced(forward: Callable[..., Any], warm_up: Sequence[int]) -> Callable[..., Any]:
    def after_a_wait(runner: Any, rows: Sequence[Any]) -> Any:
        if all(tuple(row.tokens) == tuple(warm_up) for row in rows):
            return forward(runner, rows)  # a part of a command: no other one may follow
        if (pace := _read_pace()) == _HELD:
            _wait_for_command()
        elif wait_s := float(pace):
            time.sleep(wait_s)
        return forward(runner, rows)

    return after_a_wait


def _noted(step: Callable[..., bool]) -> Callable[..., bool]:
    def noted(batcher: Any, **options: bool) -> bool:
        _batchers.add(batcher)
        return step(batcher, **options)

    return noted


def _after_a_wait(read: Callable[..., Any], start_s: float) -> Callable[..., Any]:
    def after_a_wait(*args: Any) -> Any:
        time.sleep(start_s)
        return read(*args)

    return after_a_wait


def main() -> int:
    from services.engine import app, zygote
    from services.engine.generation.batcher import Batcher
    from services.engine.generation.runner import WARM_UP, PackedRunner
    from services.engine.kv_transfer import destination, exchange
    from services.engine.stages.first_stage import FirstStageRunner

    # A busy machine computes what it cannot transfer in time; tests count what is transferred.
    # A source that is paused for 3 s is none that has ended.
    destination.CONNECT_WITHIN_S, exchange.REST_WITHIN_S = 30.0, 5.0
    vars(exchange)["STALL_S"] = 5.0

    Batcher.step = _noted(Batcher.step)  # type: ignore[method-assign]
    PackedRunner.forward = _paced(PackedRunner.forward, WARM_UP)  # type: ignore[method-assign]
    FirstStageRunner.forward = _paced(FirstStageRunner.forward, WARM_UP)  # type: ignore[method-assign]
    if start_s := os.environ.get(_START):
        # Phase `init`, of which the scheduler takes a sample of 2 s at most.
        vars(app)["read_files"] = _after_a_wait(vars(app)["read_files"], float(start_s))
    return zygote.main()


if __name__ == "__main__":
    sys.exit(main())
