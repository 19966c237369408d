"""A tree of processes that hold memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.port import Target

MIB = 1 << 20
BALLAST = Path(__file__).with_name("ballast.py")


class Tree:
    """A process with children, each with its own ballast."""

    def __init__(self, mib: int, children: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(BALLAST), str(mib), str(children)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def digest(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def target(self, groups: Cgroups) -> Target:
        pids = groups.gather("i", self.process.pid, include_host=True)
        return Target("i", "vllm", ("cpu:0",), pids)
