"""`thaw`, whose meshes have loaders that stop themselves: `python -m tests.support.stopping_mesh`.

The loaders are those of tests/support/stopping_loader.py. All other processes are the usual ones.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.support.launcher import ROOT, Thaw
from thaw.cli import app
from thaw.launcher import services, supervisor

MODULE, SUPERVISE = "tests.support.stopping_mesh", "supervise"
_popen = subprocess.Popen


class StoppingMesh(Thaw):
    """A mesh whose loaders stop at the steps that a test names."""

    def popen(self, *arguments: str, prefix: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
        if arguments[0] != "up":
            return super().popen(*arguments, prefix=prefix, **options)
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, *arguments],
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            **options,
        )


def _supervise() -> int:
    original = services._python

    def python(name: str, service: str, environment: dict[str, str], after: tuple[str, ...]) -> services.Program:
        program = original(name, service, environment, after)
        if service != "loader":
            return program
        return replace(program, command=(sys.executable, "-m", "tests.support.stopping_loader", "--in-a-mesh"))

    with patch.object(services, "_python", python):
        return supervisor.main()


def _start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start the supervisor of this module instead of the usual one."""
    return _popen([sys.executable, "-m", MODULE, SUPERVISE] if "thaw.launcher.supervisor" in command else command, **options)


if __name__ == "__main__":
    if sys.argv[1:] == [SUPERVISE]:
        sys.exit(_supervise())
    with patch.object(subprocess, "Popen", _start):
        sys.exit(app.main(sys.argv[1:]))
