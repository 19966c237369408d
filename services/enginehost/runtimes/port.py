"""The port between a host and its running engine, whichever way that runs."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Protocol

from services.enginehost.http1 import Address


@dataclass(frozen=True)
class Ended:
    """How an engine ended. `returncode`: -N by signal N; None if nobody knows. `oom`: the kernel killed it for want of memory; None
    if that cannot be told apart."""

    returncode: int | None
    oom: bool | None = None

    @property
    def by_others(self) -> bool:
        """Whether it was killed, and as far as anybody can tell not for want of memory."""
        return self.returncode == -signal.SIGKILL and not self.oom

    def __str__(self) -> str:
        if self.oom:
            return "was killed for want of memory (the kernel's out-of-memory killer)"
        if self.returncode is None:
            return "ended (its exit status is not known)"
        if self.returncode < 0:
            return f"was killed by signal {-self.returncode}"
        return f"ended with exit status {self.returncode}"


@dataclass(frozen=True)
class Activity:
    """Signs of life: they only ever grow while an engine works."""

    cpu_seconds: float = 0.0
    bytes_read: int = 0
    log_bytes: int = 0

    def advanced_from(self, earlier: Activity) -> bool:
        """Whether something was done: a tenth of a second of computing, a megabyte read, a word said."""
        return (
            self.cpu_seconds - earlier.cpu_seconds >= 0.1
            or self.bytes_read - earlier.bytes_read >= 1 << 20
            or self.log_bytes > earlier.log_bytes
        )


class Running(Protocol):
    """An engine that has been started."""

    @property
    def address(self) -> Address: ...

    @property
    def container(self) -> str | None: ...

    def pids(self) -> tuple[int, ...]:
        """All its processes, grandchildren included. Blocking: where it has no control group every process of the machine is looked at."""
        ...

    def activity(self) -> Activity: ...

    def owns_port(self) -> bool | None:
        """Whether it is this engine that listens at `address`; None if that cannot be told."""
        ...

    def note_shared(self) -> None:
        """Have the shared memory that its processes have now removed after them, however they end. Blocking."""
        ...

    async def wait(self) -> Ended: ...

    async def stop(self, signal_name: str, grace_s: float) -> Ended:
        """Ask it to end, and see that all of it is gone `grace_s` later."""
        ...
