"""The interface of a running engine, whatever its runtime."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.enginehost.http1 import Address


@dataclass(frozen=True)
class EngineExit:
    """The exit of an engine.

    Args:
        returncode: -N for signal N; None if unknown.
        oom: The kernel killed it for lack of memory; None if unknown.
    """

    returncode: int | None
    oom: bool | None = None

    @property
    def was_killed_externally(self) -> bool:
        """True if it was killed, and as far as is known not for lack of memory."""
        return self.returncode == -signal.SIGKILL and not self.oom

    def __str__(self) -> str:
        if self.oom:
            return "was killed by the kernel's out-of-memory killer"
        if self.returncode is None:
            return "ended with an unknown exit status"
        if self.returncode < 0:
            return f"was killed by signal {-self.returncode}"
        return f"ended with exit status {self.returncode}"


@dataclass(frozen=True)
class Activity:
    """Counters that grow while an engine works."""

    cpu_seconds: float = 0.0
    bytes_read: int = 0
    log_bytes: int = 0

    def advanced_from(self, earlier: Activity) -> bool:
        """True after a tenth of a second of CPU time, a megabyte read, or a log line."""
        return (
            self.cpu_seconds - earlier.cpu_seconds >= 0.1
            or self.bytes_read - earlier.bytes_read >= 1 << 20
            or self.log_bytes > earlier.log_bytes
        )


class Running(Protocol):
    """A started engine."""

    @property
    def address(self) -> Address: ...

    @property
    def container(self) -> str | None: ...

    def pids(self) -> tuple[int, ...]:
        """All its processes and their descendants.

        Blocking: without a control group it scans all processes of the machine.
        """
        ...

    def activity(self) -> Activity: ...

    def owns_port(self) -> bool | None:
        """True if this engine listens at `address`; None if unknown."""
        ...

    def take_over(self, log_path: Path, cgroup_procs: str | None) -> None:
        """Belong to another instance from now on: its log, and its control groups."""
        ...

    def record_shared_memory(self) -> None:
        """Register the shared memory of its processes for removal after they exit.

        Blocking.
        """
        ...

    async def wait(self) -> EngineExit: ...

    async def stop(self, signal_name: str, grace_s: float) -> EngineExit:
        """Send the stop signal, and SIGKILL everything that is left `grace_s` later."""
        ...
