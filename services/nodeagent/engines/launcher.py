"""How an engine process comes to be: a port with two adapters, and the environment that every engine gets."""

from __future__ import annotations

from typing import Protocol

from services.nodeagent.settings import NodeagentSettings
from shared.contracts.engine import EngineStart
from shared.contracts.models import ModelCard


class Launcher(Protocol):
    def name_for(self, start: EngineStart) -> str:
        """Tells the ways apart in phases and logs."""
        ...

    async def run(self) -> None:
        """Whatever the launcher has to keep up, until cancelled."""
        ...

    async def launch(self, start: EngineStart) -> int:
        """Start an engine; returns its pid. Raises `ThawError` when there is no process, and only then."""
        ...

    async def exit_status(self, pid: int, within_s: float) -> int | None:
        """The exit status of a process that has ended (-N: by signal N); None if it cannot be known within that time."""
        ...

    async def clean_up(self, instance_id: str, card: ModelCard) -> None:
        """Remove what a process that is gone has left outside of this machine's processes. Raises `ThawError`."""
        ...

    async def close(self) -> None:
        """End what the launcher itself started, engines excepted."""
        ...


def engine_environment(settings: NodeagentSettings) -> dict[str, str]:
    """The THAW_ settings that an engine gets from its nodeagent."""
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
