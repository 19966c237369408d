"""Define the supervisor's plan, written by `thaw up`, and the mesh's credentials."""

from __future__ import annotations

import secrets
import socket

from pydantic import BaseModel, ConfigDict, Field

from thaw.errors import CommandError
from thaw.launcher.home import Home, read_json, write_private

DATABASE_USER = "thaw"
NATS_USER = "thaw"


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodePlan(Strict):
    """Configuration of a node.

    Attributes:
        devices: Bytes, a share such as "90%", or bytes of memory of its own such as
            "4294967296/separate", by device id; empty: the nodeagent detects them.
        dram: Bytes for weights that no instance holds; None: the loader's default.
    """

    name: str
    devices: dict[str, int | str] = Field(default_factory=dict)
    dram: int | None = None


class Credentials(Strict):
    """Credentials of a state directory, made once.

    The database keeps its password across restarts, and people keep the admin key.
    """

    nats_password: str
    database_password: str
    admin_key: str


class MeshPlan(Strict):
    """Configuration of a mesh.

    Attributes:
        tls: The gateway has a certificate.
        nats_url: An external NATS server; None: the supervisor runs one.
        database_url: An external PostgreSQL; None: the supervisor runs one.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    tls: bool = False
    nodes: tuple[NodePlan, ...] = (NodePlan(name="node-0"),)
    credentials: Credentials
    api_keys: tuple[str, ...] = ()
    nats_port: int
    postgres_port: int
    nats_url: str | None = None
    database_url: str | None = None
    environment: dict[str, str] = Field(default_factory=dict)

    @property
    def gateway_url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        scheme = "https" if self.tls else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    @property
    def effective_nats_url(self) -> str:
        return self.nats_url or f"nats://{NATS_USER}:{self.credentials.nats_password}@127.0.0.1:{self.nats_port}"

    @property
    def effective_database_url(self) -> str:
        own = f"postgresql+asyncpg://{DATABASE_USER}:{self.credentials.database_password}@127.0.0.1:{self.postgres_port}/postgres"
        return self.database_url or own

    def endpoints(self) -> dict[str, str]:
        """Return the addresses of this mesh: the contents of `endpoints.json` while it runs."""
        return {
            "url": self.gateway_url,
            "admin_key": self.credentials.admin_key,
            "nats_url": self.effective_nats_url,
            "database_url": self.effective_database_url,
        }


def credentials_of(home: Home, admin_key: str | None = None) -> Credentials:
    """Return the credentials stored under `home`, and create them at the first call.

    Args:
        home: The state directory.
        admin_key: The admin key that the operator chose.
    """
    stored = read_json(home.credentials_file) or {}
    credentials = Credentials(
        nats_password=stored.get("nats_password") or secrets.token_urlsafe(24),
        database_password=stored.get("database_password") or secrets.token_urlsafe(24),
        admin_key=admin_key or stored.get("admin_key") or f"thaw-admin-{secrets.token_urlsafe(24)}",
    )
    write_private(home.credentials_file, credentials.model_dump_json(indent=1))
    return credentials


def read_plan(home: Home) -> MeshPlan:
    """Return the plan of the mesh under `home`. Raises `CommandError` if there is none."""
    stored = read_json(home.plan_file)
    if stored is None:
        raise CommandError(f"There is no mesh plan in {home.plan_file}.", "Start the mesh with `thaw up`.")
    return MeshPlan.model_validate(stored)


def listen_fault(host: str, port: int) -> OSError | None:
    """Return the reason why a server cannot listen there now; None: it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            return e
        except (TypeError, ValueError) as e:  # no name of a host has this form
            return socket.gaierror(socket.EAI_NONAME, str(e))
    return None
