"""Write and read the supervisor's status in `run/supervisor.json`.

There is one writer and any number of readers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from thaw.errors import CommandError
from thaw.launcher.home import Home, read_json
from thaw.launcher.lifecycle import Status
from thaw.launcher.processes import Identity


class ServiceStatus(BaseModel):
    """The state of one service.

    Attributes:
        process: Its process; None while it does not run.
        hangs: Number of restarts because it hung.
        last_hang: Reason of the last hang.
        last_hang_at: Time of the last hang in Unix seconds.
    """

    status: Status
    process: Identity | None = None
    restarts: int = 0
    failures: int = 0
    last_exit: int | None = None
    hangs: int = 0
    last_hang: str | None = None
    last_hang_at: float | None = None


class MeshStatus(BaseModel):
    supervisor: Identity
    stopping: bool = False
    error: str | None = None
    remedy: str = ""
    services: dict[str, ServiceStatus] = Field(default_factory=dict)

    @property
    def stage(self) -> Literal["starting", "running", "stopping"]:
        if self.stopping:
            return "stopping"
        return "running" if all(s.status == "ready" for s in self.services.values()) else "starting"

    @property
    def has_survivors(self) -> bool:
        """True if a service's process is alive, even after the death of the supervisor."""
        return any(p.is_alive() for p in self.processes())

    def processes(self) -> list[Identity]:
        return [s.process for s in self.services.values() if s.process is not None]


def read_status(home: Home) -> MeshStatus | None:
    """Return the last status written, even of a dead supervisor; None without one.

    Raises:
        CommandError: Another version of Thaw wrote the status in another form.
    """
    stored = read_json(home.supervisor_file)
    try:
        return None if stored is None else MeshStatus.model_validate(stored)
    except ValidationError as e:
        raise CommandError(
            f"{home.supervisor_file} is not understood: another version of Thaw wrote it.",
            "`thaw down` of that version stops its mesh; if none runs, remove the file.",
            code="state_directory",
        ) from e


def running_status(home: Home) -> MeshStatus | None:
    """Return the status of a living supervisor.

    A stale file (its pid is dead, or reused by another process) is ignored.
    """
    status = read_status(home)
    return status if status is not None and status.supervisor.is_alive() else None
