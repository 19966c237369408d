"""A zygote whose engines fail on prompts of certain tokens.

It is started as `python -m tests.support.faulty_zygote SOCKET`. A step with a row that begins with
four tokens of a kind

    RAISES  raises an exception
    LEAKS   keeps 32 MiB in an executor, as each later step of the model does
    LOOPS   never ends, in an executor
    CRASHES ends the process by SIGSEGV, in an executor

All but the first happen in executors only, so that the requests end in a process of their own.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

RAISES, LEAKS, LOOPS, CRASHES = 11, 12, 13, 14
_LENGTH = 4
_LEAK_BYTES = 32 << 20
_kept: list[bytearray] = []
_processes = {"is_executor": False}


def prompt(token: int) -> list[int]:
    """Return a prompt that causes the fault."""
    return [token] * _LENGTH


def _faulty(forward: Callable[..., Any]) -> Callable[..., Any]:
    leaking: set[int] = set()

    def with_faults(runner: Any, rows: Sequence[Any]) -> Any:
        kinds = {row.tokens[0] for row in rows if list(row.tokens[:_LENGTH]) == [row.tokens[0]] * _LENGTH}
        if RAISES in kinds:
            raise RuntimeError("a fault of this test")
        if _processes["is_executor"]:
            if LEAKS in kinds:
                leaking.add(id(runner))
            if id(runner) in leaking:
                _kept.append(bytearray(b"x" * _LEAK_BYTES))
            if CRASHES in kinds:
                ctypes.string_at(0)
            while LOOPS in kinds:
                pass
        return forward(runner, rows)

    return with_faults


def main() -> int:
    from services.engine import executor, zygote
    from services.engine.generation.runner import PackedRunner

    PackedRunner.forward = _faulty(PackedRunner.forward)  # type: ignore[method-assign]
    run = executor.run_executor

    async def run_faulty(*arguments: Any, **named: Any) -> int:
        _processes["is_executor"] = True
        return await run(*arguments, **named)

    executor.run_executor = run_faulty
    return zygote.main()


if __name__ == "__main__":
    sys.exit(main())
