"""Make a `MeshPlan` from options, the environment, thaw.yaml and defaults.

They take precedence in this order.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass

from shared.contracts.prices import Prices
from shared.ports import free_port, keep_port
from thaw.config.load import MeshConfig, NodeConfig, SchedulerConfig
from thaw.errors import CommandError
from thaw.launcher.home import Home
from thaw.launcher.plan import MeshPlan, NodePlan, credentials_of

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8080
MEMORY_SHARE = 0.7
"""Part of the available memory that the cpu devices get, as the nodeagent's own default; several
nodes divide it.
"""
DRAM_SHARE = 0.15
"""Part of it for weights that no instance holds, as the loader's own default; several nodes divide
it.
"""
_HASH = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True)
class Wanted:
    """Command-line options (None: not given) over the `mesh:` section of a thaw.yaml."""

    host: str | None = None
    port: int | None = None
    nodes: int | None = None
    mesh: MeshConfig = MeshConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    prices: Prices | None = None

    @property
    def environment(self) -> dict[str, str]:
        """THAW_ settings of the services beside their own environment."""
        found = {
            "THAW_POLICY": self.scheduler.policy,
            "THAW_PRICES": self.prices.model_dump_json(exclude_none=True) if self.prices is not None else None,
        }
        chosen = {name: value for name, value in found.items() if value is not None and name not in os.environ}
        return {**self.mesh.environment, **chosen}

    @property
    def host_or_default(self) -> str:
        return self.host or os.environ.get("THAW_GATEWAY_HOST") or self.mesh.host or DEFAULT_HOST

    @property
    def port_or_default(self) -> int:
        given = os.environ.get("THAW_GATEWAY_PORT", "")
        if given and not (given.isdigit() and 0 < int(given) < 65536):
            raise CommandError(f"THAW_GATEWAY_PORT is {given!r}.", "Set it to a port from 1 to 65535.", code="bad_setting")
        return self.port or (int(given) if given else None) or self.mesh.port or DEFAULT_PORT

    @property
    def api_key_hashes(self) -> tuple[str, ...]:
        """Return the hashes of the keys in the file, which may be hashes already."""
        return tuple(key if _HASH.match(key) else hashlib.sha256(key.encode()).hexdigest() for key in self.mesh.api_keys)

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return the nodes: those of the file first; `--nodes` cuts them or adds node-N."""
        named = tuple(self.mesh.nodes)
        count = self.nodes if self.nodes is not None else max(1, len(named))
        more = (name for i in range(count + len(named)) if (name := f"node-{i}") not in named)
        return (*named, *more)[:count]


def make_plan(home: Home, wanted: Wanted, available_memory: int, demo_budget: int | None = None) -> MeshPlan:
    """Make the plan, and missing credentials.

    Args:
        demo_budget: Bytes of cpu:0 of the first node, whatever else is configured for it.
    """
    names = wanted.node_names
    share = int(available_memory * MEMORY_SHARE / len(names))
    nodes = []
    for i, name in enumerate(names):
        configured = wanted.mesh.nodes.get(name, NodeConfig())
        devices, dram = configured.devices, configured.dram
        if i == 0 and demo_budget is not None:
            devices = {"cpu:0": demo_budget}
        elif not devices and len(names) > 1:
            devices = {"cpu:0": share}
        if dram is None and len(names) > 1 and "THAW_DRAM_BYTES" not in os.environ:
            dram = int(available_memory * DRAM_SHARE / len(names))
        nodes.append(NodePlan(name=name, devices=devices, dram=dram))
    nats_port = wanted.mesh.nats_port or _pick_port({wanted.port_or_default})
    postgres_port = wanted.mesh.postgres_port or _pick_port({wanted.port_or_default, nats_port})
    return MeshPlan(
        host=wanted.host_or_default,
        port=wanted.port_or_default,
        tls=bool(wanted.environment.get("THAW_TLS_CERTIFICATE") or os.environ.get("THAW_TLS_CERTIFICATE")),
        nodes=tuple(nodes),
        credentials=credentials_of(home, wanted.mesh.admin_key or os.environ.get("THAW_ADMIN_KEY")),
        api_keys=wanted.api_key_hashes,
        nats_port=nats_port,
        postgres_port=postgres_port,
        nats_url=os.environ.get("THAW_NATS_URL") or None,
        database_url=os.environ.get("THAW_DATABASE_URL") or None,
        environment=wanted.environment,
    )


def _pick_port(avoid: set[int]) -> int:
    """Return a free port for a server that starts later; no other process picks it until then.

    This process keeps it until its end.
    """
    if sys.platform != "linux":
        return free_port(avoid=avoid)
    kept = keep_port(avoid=avoid)
    port = int(kept.getsockname()[1])
    kept.detach()  # it stays open
    return port
