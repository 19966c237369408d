"""Simulations in a process of their own, one at a time; see docs/adr/0082.

The process has a low priority and limits of time and memory, and ends with its standard input, so
that it never outlives its gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from services.gateway.adapters.recorded_requests import write_recording
from shared.contracts.admin import ClusterView
from shared.contracts.base import ErrorBody
from shared.contracts.simulation import MAX_REPLAYED, SimulationProgress, SimulationResult, StartSimulation
from shared.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound, ThawError, Unavailable, from_body
from shared.messaging import Mesh
from shared.policies import policy_names

log = logging.getLogger(__name__)
_MODULE = "simulator"
_LINE_BYTES = 64 * 1024
_RESULT_BYTES = 4 * 1024 * 1024
View = Callable[[], Awaitable[ClusterView]]


def is_installed() -> bool:
    """True if the simulator can be started; it is not imported."""
    return importlib.util.find_spec(_MODULE) is not None


def command_line(order: StartSimulation) -> str:
    """Return the command that simulates the same."""
    without = ["--without", order.without] if order.without is not None else []
    limits = ["--last", f"{order.last_s}s", "--latest", str(MAX_REPLAYED)]
    return shlex.join(["thaw", "simulate", "--from-mesh", "--mesh", *limits, "--policy", ",".join(order.policies), *without])


class Simulations:
    """Run simulations of a gateway.

    Args:
        view: Asks the scheduler for its view of the cluster.
        timeout_s: Longest time of a simulation, and limit of its processor time.
        memory_bytes: Limit of the process's address space.
    """

    def __init__(self, mesh: Mesh, view: View, timeout_s: float, memory_bytes: int) -> None:
        self._mesh = mesh
        self._view = view
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._is_running = False
        self.pid: int | None = None
        """Process of the running simulation."""

    def check(self, order: StartSimulation) -> None:
        """Check whether a simulation can start.

        Raises:
            NotFound: The gateway has no simulator.
            InvalidRequest: There is no such policy, or one is named twice.
            Conflict: Another simulation is running.
        """
        if not is_installed():
            raise NotFound("This gateway has no simulator. Install the package thaw-mesh whole, or run `thaw simulate` elsewhere")
        if unknown := [p for p in order.policies if p not in policy_names()]:
            raise InvalidRequest(f"There is no policy {unknown[0]!r}. Choose from {', '.join(policy_names())}", param="policies")
        if len(set(order.policies)) < len(order.policies):
            raise InvalidRequest("A policy is named twice. Name each one once", param="policies")
        if self._is_running:
            raise Conflict("This gateway runs a simulation already. Wait for its end, or cancel it", should_retry=False)

    async def run(self, order: StartSimulation, report: Callable[[SimulationProgress], None]) -> SimulationResult:
        """Simulate, and return the result. The process is killed if this is cancelled.

        Args:
            report: Receives the progress.

        Raises:
            ThawError: The simulation cannot start (see `check`), or it failed.
        """
        self.check(order)
        self._is_running = True
        try:
            async with asyncio.timeout(self._timeout_s):
                with tempfile.TemporaryDirectory(prefix="thaw-simulation-") as directory:
                    await write_recording(self._mesh, await self._view(), Path(directory), time.time() - order.last_s)
                    return await self._simulate(order, Path(directory), report)
        except TimeoutError as e:
            raise _too_long(self._timeout_s) from e
        finally:
            self._is_running = False

    async def _simulate(
        self, order: StartSimulation, directory: Path, report: Callable[[SimulationProgress], None]
    ) -> SimulationResult:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", _MODULE)
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, limit=_LINE_BYTES)
        self.pid = process.pid
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        output = asyncio.create_task(_read_bounded(process.stdout), name="simulation output")
        last = ""
        try:
            with contextlib.suppress(ConnectionError):  # it ended already; its status says why
                process.stdin.write(json.dumps(self._order(order, directory)).encode() + b"\n")
                await process.stdin.drain()
            async for line in process.stderr:
                if line.startswith(b'{"done"'):
                    report(SimulationProgress.model_validate_json(line))
                else:
                    last = line.decode(errors="replace").strip() or last
            text = await output
            return self._result(order, text, await process.wait(), last)
        finally:
            self.pid = None
            output.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _order(self, order: StartSimulation, directory: Path) -> dict[str, Any]:
        """Return the order of the process, as `thaw simulate --from-mesh --mesh` sends it."""
        return {
            "recording": str(directory),
            "cluster": str(directory / "cluster.yaml"),
            "models": str(directory / "models.yaml"),
            "trace": str(directory / "run.jsonl"),
            "policies": order.policies,
            "without": order.without,
            "mesh": True,
            "limits": {"cpu_s": max(1, int(self._timeout_s)), "memory_bytes": self._memory_bytes},
        }

    def _result(self, order: StartSimulation, text: bytes, status: int, last: str) -> SimulationResult:
        if status == -signal.SIGXCPU:
            raise _too_long(self._timeout_s)
        try:
            document = json.loads(text)
        except ValueError as e:
            log.warning("simulation failed", extra={"status": status, "error": last})
            raise Unavailable(f"The simulation failed with status {status}: {last or 'see the log'}", should_retry=False) from e
        if "error" in document:
            raise from_body(ErrorBody.model_validate(document["error"]))
        return SimulationResult(recorded=document["recorded"], runs=document["runs"], command=command_line(order))


def _too_long(timeout_s: float) -> ThawError:
    return DeadlineExceeded(
        f"The simulation took longer than {timeout_s:g} s. Replay a shorter time, or compare fewer policies", should_retry=False
    )


async def _read_bounded(stream: asyncio.StreamReader) -> bytes:
    """Read to the end, of which at most `_RESULT_BYTES` are kept."""
    found = bytearray()
    while part := await stream.read(_LINE_BYTES):
        found += part[: _RESULT_BYTES - len(found)]
    return bytes(found)
