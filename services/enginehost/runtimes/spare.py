"""A spare interpreter that has imported an engine's modules.

Imports take half of a Python engine's start.
"""

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
    """A waiting `python -m module`: a child of this process, used once."""

    def __init__(self, python: str, module: str, environment: Mapping[str, str], niceness: int, network: str = "") -> None:
        """Start the interpreter, which imports its modules at once.

        Args:
            python: The interpreter.
            module: The module to import.
            environment: Its environment until it becomes an engine.
            niceness: Added to the niceness of this process.
            network: The NETWORK argument of spawn.py.

        Raises:
            EngineFailed: The interpreter cannot be started.
        """
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
        """Turn the spare into the engine that `command` starts.

        Returns:
            The process, or None if the command is another program or the spare has exited; the
            spare is then closed.
        """
        order = {
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
                pipe.write(json.dumps(order).encode() + b"\n")
        except OSError:
            log.warning("a spare interpreter cannot be used", extra={"program": command.argv[0]})
            self.close()
            return None
        return self.child

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        if self.child.stdin is not None:
            with contextlib.suppress(OSError):
                self.child.stdin.close()
