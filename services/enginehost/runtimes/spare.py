"""An engine's interpreter that has its imports done before anybody asks for a model: half of a Python engine's start is importing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from services.enginehost.drivers.port import Command
from services.enginehost.runtimes import preload, spawn
from shared.errors import EngineFailed

log = logging.getLogger(__name__)
_SPAWN = Path(spawn.__file__)
_PRELOAD = Path(preload.__file__)


class Spare:
    """`python -m module` in waiting, a child of this process and gone with it. It serves once."""

    def __init__(self, python: str, module: str, environment: Mapping[str, str], niceness: int, network: str = "") -> None:
        """`network`: as spawn.py takes it. Raises `EngineFailed`. It imports from now on; what it is told meanwhile it reads then."""
        self._command = (python, "-m", module)
        self.has_own_network = bool(network)
        argv = [
            sys.executable,
            "-I",
            str(_SPAWN),
            str(os.getpid()),
            "",
            str(niceness),
            network,
            "--",
            python,
            str(_PRELOAD),
            module,
        ]
        try:
            self.child = subprocess.Popen(argv, stdin=subprocess.PIPE, env=dict(environment), start_new_session=True)
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            raise EngineFailed(f"{python} cannot be started: {e}") from e

    def become(
        self, command: Command, environment: Mapping[str, str], cgroup_procs: str | None, niceness: int, log_path: Path
    ) -> subprocess.Popen[bytes] | None:
        """The process, which is the engine that `command` starts from now on; None if that is another program, or it has ended: it is gone then."""
        told = {
            "arguments": command.argv[len(self._command) :],
            "environment": dict(environment),
            "cgroups": [path for path in (cgroup_procs or "").split(":") if path],
            "niceness": niceness,
            "log": str(log_path),
        }
        assert self.child.stdin is not None
        try:
            if command.argv[: len(self._command)] != self._command or self.child.poll() is not None:
                raise BrokenPipeError
            with self.child.stdin as pipe:
                pipe.write(json.dumps(told).encode() + b"\n")
        except OSError:
            log.warning("an interpreter in waiting is of no use", extra={"program": command.argv[0]})
            self.close()
            return None
        return self.child

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        if self.child.stdin is not None:
            with contextlib.suppress(OSError):
                self.child.stdin.close()
