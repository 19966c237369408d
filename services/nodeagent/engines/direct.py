"""Launches each engine as a new interpreter.

Slower by its imports, with nothing shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

from services.nodeagent.engines.spares import Spares
from shared.contracts.engine import EngineStart
from shared.contracts.executor import ExecutorStart
from shared.contracts.models import ModelCard
from shared.environment import find_referenced, without_credentials
from shared.errors import EngineFailed
from shared.start_files import remove_stale_start_files

_CLEAN_WITHIN_S = 30.0


class DirectLauncher:
    """Runs `python -m <module> SPEC.json` in its own session.

    So signals to this agent do not reach engines. The process removes the file, which has
    credentials, once it has read it.
    """

    def __init__(self, module: str, specs: Path, name: str = "direct", spares: Spares | None = None) -> None:
        """Create a launcher.

        Args:
            module: Module that an engine's process runs.
            specs: Directory for the files that processes read at their start.
            name: Its name in logs.
            spares: Spare hosts, used where one is available.
        """
        self._name = name
        self._module = module
        self._specs = specs
        self._spares = spares
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        specs.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_stale_start_files(specs)

    def name_for(self, start: EngineStart) -> str:
        return self._name

    async def run(self) -> None:
        """Keep spare hosts available."""
        if self._spares is not None:
            await self._spares.run()

    async def until_warm(self) -> None:
        """Return None: direct starts keep no process warm."""

    async def launch(self, start: EngineStart | ExecutorStart) -> int:
        try:
            spare = self._spares.take(start) if self._spares is not None and isinstance(start, EngineStart) else None
            child = spare or self._spawn(start)
        except OSError as e:
            raise EngineFailed(f"The engine process could not be started: {e}") from e
        self._children[child.pid] = child
        return child.pid

    def _spawn(self, start: EngineStart | ExecutorStart) -> subprocess.Popen[bytes]:
        """Start an interpreter.

        Blocks for about a millisecond: small local files and a vfork.
        """
        spec = self._spec_path(start.instance_id)
        kept = find_referenced(start.card.spec.env) if isinstance(start, EngineStart) else ()
        try:
            with os.fdopen(os.open(spec, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(start.model_dump_json())
            with Path(start.log_path).open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-m", self._module, str(spec)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**without_credentials(os.environ, kept), **start.environment},
                    start_new_session=True,
                )
        except OSError:
            with contextlib.suppress(OSError):
                spec.unlink()
            raise

    def _spec_path(self, instance_id: str) -> Path:
        return self._specs / f"{instance_id}.json"

    async def exit_status(self, pid: int, within_s: float) -> int | None:
        child = self._children.get(pid)
        if child is None:
            return None
        try:  # its pidfd has fired: this reaps the zombie
            status = await asyncio.to_thread(child.wait, within_s)
        except subprocess.TimeoutExpired:
            return None
        if self._children.get(pid) is child:  # each instance of an executor asks for its status
            del self._children[pid]
        return status

    async def clean_up(self, instance_id: str, card: ModelCard) -> None:
        """Remove the file of a start that was not read, and the container of a killed host.

        A new host process of the same module does the latter.
        """
        with contextlib.suppress(OSError):
            self._spec_path(instance_id).unlink(missing_ok=True)
        if card.spec.container is None:
            return
        try:
            reaper = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, "--reap", instance_id, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        except OSError as e:
            raise EngineFailed(f"The process that removes containers of {instance_id} could not be started: {e}") from e
        try:
            async with asyncio.timeout(_CLEAN_WITHIN_S):
                _, words = await reaper.communicate()
        except TimeoutError as e:
            reaper.kill()
            raise EngineFailed(f"Containers of {instance_id} were not removed within {_CLEAN_WITHIN_S:g} s") from e
        if reaper.returncode:
            raise EngineFailed(f"Containers of {instance_id} could not be removed: {words.decode(errors='replace').strip()}")

    async def close(self) -> None:
        """Stop the spare hosts. Engines keep running."""
        self._children.clear()
        if self._spares is not None:
            await self._spares.close()
