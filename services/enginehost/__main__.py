"""Entry points of an engine host.

- `python -m services.enginehost SPEC.json` hosts one engine; the file holds an `EngineStart` as
  JSON, and is removed once it has been read.
- `python -m services.enginehost --spare ENGINE` is a spare host: it starts an interpreter of the
  engine and imports its modules. Then it hosts the `EngineStart` that it reads from standard input
  as one line of JSON.
- `python -m services.enginehost --reap INSTANCE` removes containers that a killed host left behind.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import time
from functools import partial
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from services.enginehost.app import run_host
from services.enginehost.drivers.registry import DRIVERS
from services.enginehost.runtimes.container import remove_containers
from services.enginehost.runtimes.docker import Docker
from services.enginehost.runtimes.endpoint import LOOPBACK_ENVIRONMENT, can_isolate
from services.enginehost.runtimes.output import redirect_output
from services.enginehost.runtimes.process import clean_environment
from services.enginehost.runtimes.spare import Spare
from services.enginehost.settings import HostSettings
from shared.contracts.engine import EngineStart
from shared.contracts.engines import Engine
from shared.errors import ThawError
from shared.processes import mark_of
from shared.runtime import run_service
from shared.start_files import take_start_file


def main() -> int:
    match sys.argv[1:]:
        case ["--reap", instance_id]:
            return asyncio.run(reap(HostSettings(), instance_id))
        case ["--spare", engine]:
            return wait(engine)
        case [path]:
            return host(Path(path))
    sys.stderr.write("usage: python -m services.enginehost SPEC.json | --reap INSTANCE | --spare ENGINE\n")
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
        start = EngineStart.model_validate_json(take_start_file(path))
    except (OSError, ValidationError) as e:
        sys.stderr.write(f"enginehost: {path}: {e}\n")
        return 2
    return _run(start, time.monotonic() - max(0.0, time.time() - psutil.Process().create_time()), None)


def wait(engine: str) -> int:
    """Run a spare host until standard input closes or the engine's interpreter ends."""
    settings = HostSettings()
    driver = DRIVERS.get(TypeAdapter(Engine).validate_python(engine))
    command = driver.spare_command(settings) if driver is not None else None
    if command is None:
        sys.stderr.write(f"enginehost: engine {engine} does not support spare interpreters\n")
        return 2
    python, _, module = command.argv
    network = "own" if driver is not None and driver.isolates and can_isolate() else ""
    more = LOOPBACK_ENVIRONMENT if network else {}
    spare = Spare(python, module, clean_environment("", {**more, **command.env}), settings.engine_niceness, network)
    line = _first_line(spare)
    if not line:
        spare.close()
        return 0
    start = EngineStart.model_validate_json(line)
    redirect_output(start.log_path)
    return _run(start, time.monotonic(), spare)


def _first_line(spare: Spare) -> bytes:
    """Read a line from standard input.

    Empty if it closes or the interpreter ends first.
    """
    watched = os.pidfd_open(spare.child.pid)
    found = b""
    try:
        while not found.endswith(b"\n"):
            ready, _, _ = select.select([0, watched], [], [])
            if 0 not in ready or not (more := os.read(0, 1 << 20)):
                return b""
            found += more
        return found
    finally:
        os.close(watched)


def _run(start: EngineStart, started_at_s: float, spare: Spare | None) -> int:
    os.environ.update(start.environment)
    os.environ["THAW_NODE"] = start.node
    return run_service("enginehost", HostSettings, partial(run_host, start=start, started_at_s=started_at_s, spare=spare))


if __name__ == "__main__":
    sys.exit(main())
