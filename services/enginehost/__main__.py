"""`python -m services.enginehost SPEC.json`: one hosted engine; the file holds an `EngineStart` as JSON.

`python -m services.enginehost --reap INSTANCE` removes the containers that a host which was killed has left behind.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial
from pathlib import Path

import psutil
from pydantic import ValidationError

from services.enginehost.app import run_host
from services.enginehost.runtimes.container import remove_containers
from services.enginehost.runtimes.docker import Docker
from services.enginehost.settings import HostSettings
from shared.contracts.engine import EngineStart
from shared.errors import ThawError
from shared.processes import mark_of
from shared.runtime import run_service


def main() -> int:
    match sys.argv[1:]:
        case ["--reap", instance_id]:
            return asyncio.run(reap(HostSettings(), instance_id))
        case [path]:
            return host(Path(path))
    sys.stderr.write("usage: python -m services.enginehost SPEC.json | --reap INSTANCE\n")
    return 2


async def reap(settings: HostSettings, instance_id: str) -> int:
    try:
        await remove_containers(Docker(settings.container_socket), mark_of(settings.scope, instance_id))
    except ThawError as e:
        sys.stderr.write(f"enginehost: {e.message}\n")
        return 1
    return 0


def host(path: Path) -> int:
    try:
        start = EngineStart.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as e:
        sys.stderr.write(f"enginehost: {path}: {e}\n")
        return 2
    born = time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())
    os.environ.update(start.environment)
    os.environ["THAW_NODE"] = start.node
    return run_service("enginehost", HostSettings, partial(run_host, start=start, born=born))


if __name__ == "__main__":
    sys.exit(main())
