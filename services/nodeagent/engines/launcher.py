"""The port that launches engine processes, and their environment."""

from __future__ import annotations

from typing import Protocol

from services.nodeagent.settings import NodeagentSettings
from shared.contracts.engine import EngineStart
from shared.contracts.executor import ExecutorStart
from shared.contracts.models import ModelCard


class Launcher(Protocol):
    """Launches engine processes of one kind."""

    def name_for(self, start: EngineStart) -> str:
        """Name of the launch method, for phases and logs."""
        ...

    async def run(self) -> None:
        """Background work of the launcher, until cancelled."""
        ...

    async def until_warm(self) -> None:
        """Return once an engine starts as quickly as it ever will, or after a bounded time."""
        ...

    async def launch(self, start: EngineStart | ExecutorStart) -> int:
        """Start an engine or executor and return its pid.

        Raises `ThawError` if and only if there is no process.
        """
        ...

    async def exit_status(self, pid: int, within_s: float) -> int | None:
        """Exit status of an ended process (-N for signal N).

        None if it is not known within `within_s` seconds.
        """
        ...

    async def clean_up(self, instance_id: str, card: ModelCard) -> None:
        """Remove a dead process's resources elsewhere, such as containers.

        Raises `ThawError`.
        """
        ...

    async def close(self) -> None:
        """Stop the launcher's own processes. Engines keep running."""
        ...


def engine_environment(settings: NodeagentSettings) -> dict[str, str]:
    """The THAW_ variables that an engine gets from its nodeagent."""
    found = {
        "THAW_NATS_URL": settings.nats_url.get_secret_value(),
        "THAW_HOME": str(settings.state),
        "THAW_NODE": settings.node,
        "THAW_LOG_LEVEL": settings.log_level,
        "THAW_LOG_FORMAT": settings.log_format,
        "THAW_LOG_PROMPTS": str(settings.log_prompts).lower(),
        "THAW_OTLP_PROTOCOL": settings.otlp_protocol,
        "THAW_ENGINE_THREADS": str(settings.engine_threads),
    }
    if settings.otlp_endpoint:
        found["THAW_OTLP_ENDPOINT"] = settings.otlp_endpoint
    return found
