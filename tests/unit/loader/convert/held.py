"""A conversion that waits once it has begun: `python -m tests.unit.loader.convert.held SRC DST`.

It does what `python -m weights.convert` does. After its first piece it waits until standard input
has a line, or ends: a test that is paused for seconds still finds it incomplete.
"""

from __future__ import annotations

import sys

from weights.convert import __main__ as program


class _HeldPrinter(program._Printer):
    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        super().__call__(stage, done, total)
        self._calls += 1
        if self._calls == 2:  # the first piece is written by then
            sys.stdin.readline()
            self._next = 0.0  # the next piece is reported


if __name__ == "__main__":
    vars(program)["_Printer"] = _HeldPrinter
    sys.exit(program.main())
