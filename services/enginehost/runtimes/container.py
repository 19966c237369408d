"""An engine as a container of the node's Docker or Podman."""

from __future__ import annotations

from collections.abc import Mapping

from services.enginehost.drivers.port import Launch
from services.enginehost.runtimes.port import Running
from services.enginehost.settings import HostSettings
from shared.contracts.engine import EngineStart
from shared.contracts.models import ContainerOptions
from shared.errors import EngineFailed


async def start_container(
    launch: Launch,
    options: ContainerOptions,
    arguments: tuple[str, ...],
    env: Mapping[str, str],
    start: EngineStart,
    settings: HostSettings,
) -> Running:
    raise EngineFailed("containers come next")
