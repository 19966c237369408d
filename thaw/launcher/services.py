"""Define the processes of a one-machine mesh.

The module has their command lines, environments, and the order in which they start and stop.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from thaw.launcher.home import Home
from thaw.launcher.lifecycle import Service
from thaw.launcher.plan import MeshPlan, NodePlan
from thaw.launcher.processes import MARK
from thaw.launcher.servers import Postgres, nats_environment, nats_program
from thaw.launcher.stale_locks import remove_stale_locks

SERVICES = ("services.nodeagent", "services.loader", "services.scheduler", "services.gateway", "services.migrator")
"""The modules of the services."""
_RANKS = {"gateway": 0, "migrator": 0, "nodeagent": 1, "loader": 2, "scheduler": 3, "postgres": 4, "nats": 5}
_BOUNDS_S = {
    "gateway": 40.0,
    "migrator": 10.0,
    "nodeagent": 30.0,
    "loader": 10.0,
    "scheduler": 10.0,
    "postgres": 15.0,
    "nats": 10.0,
}
"""A gateway lets open requests finish (30 s), a nodeagent has its engines to stop."""


@dataclass(frozen=True)
class Program:
    """One process to run.

    Attributes:
        port: The port on loopback on which it listens once it is ready. None: it reports that
            itself (`shared.runtime.report_ready`).
        listens: Host and port of a socket that is kept here and handed to it, so that those who
            connect while it is started again wait for it instead of being refused.
        prepare: Called before each start, in a thread.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    port: int | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    starts_after: tuple[str, ...] = ()
    listens: tuple[str, int] | None = None
    prepare: Callable[[], None] | None = None

    @property
    def module(self) -> str | None:
        """The service's module; None for a program that is not one of `SERVICES`."""
        module = self.command[-1]
        return module if self.command[1:-1] == ("-m",) and module in SERVICES else None

    @property
    def service(self) -> Service:
        kind = self.name.split(".")[0]
        return Service(self.name, self.starts_after, _RANKS[kind], _BOUNDS_S[kind])


def common_environment(home: Home, plan: MeshPlan) -> dict[str, str]:
    """Return the environment variables of every service."""
    marks = {MARK: "1", "THAW_HOME": str(home.root)}
    return {**plan.environment, **marks, "THAW_NATS_URL": plan.effective_nats_url, "PYTHONUNBUFFERED": "1"}


def programs_of(home: Home, plan: MeshPlan, postgres: Postgres | None) -> tuple[Program, ...]:
    """Return the programs of a mesh, servers first.

    Args:
        home: The state directory.
        plan: The mesh.
        postgres: The database server; None: it is external.
    """
    marks = {MARK: "1", "THAW_HOME": str(home.root)}
    common = common_environment(home, plan)
    servers: list[Program] = []
    if plan.nats_url is None:
        servers.append(
            Program("nats", (nats_program(), "-c", str(home.run / "nats.conf")), {**nats_environment(), **marks}, plan.nats_port)
        )
    if postgres is not None:
        # SIGINT is PostgreSQL's fast shutdown; SIGTERM would wait for clients to leave.
        servers.append(
            Program(
                "postgres",
                tuple(postgres.server_command(plan)),
                marks,
                plan.postgres_port,
                signal.SIGINT,
                prepare=partial(remove_stale_locks, postgres),
            )
        )
    after = tuple(s.name for s in servers)
    programs = [_python("scheduler", "scheduler", {**common, "THAW_DATABASE_URL": plan.effective_database_url}, after)]
    programs.append(_python("migrator", "migrator", common, after))
    for node in plan.nodes:
        environment = {**common, **_node_environment(node)}
        programs.append(_python(f"loader.{node.name}", "loader", environment, after))
        programs.append(_python(f"nodeagent.{node.name}", "nodeagent", environment, after))
    gateway = {
        **common,
        "THAW_GATEWAY_HOST": plan.host,
        "THAW_GATEWAY_PORT": str(plan.port),
        "THAW_ADMIN_KEY": plan.credentials.admin_key,
    }
    if plan.api_keys:
        gateway["THAW_API_KEYS"] = ",".join(plan.api_keys)
    programs.append(replace(_python("gateway", "gateway", gateway, after), listens=(plan.host, plan.port)))
    return (*servers, *programs)


def _python(name: str, service: str, environment: dict[str, str], after: tuple[str, ...]) -> Program:
    return Program(name, (sys.executable, "-m", f"services.{service}"), environment, starts_after=after)


def _node_environment(node: NodePlan) -> dict[str, str]:
    environment = {"THAW_NODE": node.name}
    if node.devices:
        environment["THAW_DEVICES"] = ",".join(f"{device}={size}" for device, size in node.devices.items())
    if node.dram is not None:
        environment["THAW_DRAM_BYTES"] = str(node.dram)
    return environment
