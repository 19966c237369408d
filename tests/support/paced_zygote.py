"""A zygote whose engines wait before each step, as for a device that is slower than this one.

It is started as `python -m tests.support.paced_zygote SOCKET`. The builtin engine computes several
hundred tokens of a small model in a second, and keeps a core busy. A stream that has to last for
some seconds, while processes are stopped and killed around it, takes less than half of the CPU time
if the engine waits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

STEP_S: Final = 0.006
PACED: Final = {"THAW_ZYGOTE_MODULE": "tests.support.paced_zygote"}
"""Environment of a mesh whose engines are paced."""


def _paced(forward: Callable[..., Any]) -> Callable[..., Any]:
    def after_a_wait(runner: Any, rows: Sequence[Any]) -> Any:
        time.sleep(STEP_S)
        return forward(runner, rows)

    return after_a_wait


def main() -> int:
    from services.engine import zygote
    from services.engine.generation.runner import PackedRunner
    from services.engine.stages.first_stage import FirstStageRunner

    PackedRunner.forward = _paced(PackedRunner.forward)  # type: ignore[method-assign]
    FirstStageRunner.forward = _paced(FirstStageRunner.forward)  # type: ignore[method-assign]
    return zygote.main()


if __name__ == "__main__":
    sys.exit(main())
