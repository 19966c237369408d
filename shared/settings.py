"""Settings that every service shares.

Each service adds its own in `services/<name>/settings.py`; all are read from `THAW_*` variables.

A file `thaw_<setting>` in the directory that THAW_SECRETS_DIR names serves as well (Docker and
Kubernetes secrets); the environment wins. `docs/configuration.md` is generated from these classes.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class CommonSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="THAW_", extra="ignore", frozen=True, secrets_dir=os.environ.get("THAW_SECRETS_DIR") or None
    )

    nats_url: SecretStr = Field(
        default=SecretStr("nats://127.0.0.1:4222"), description="NATS servers, comma-separated, credentials included."
    )
    nats_replicas: int = Field(
        default=1,
        ge=1,
        le=5,
        description="NATS servers that keep each stream and bucket: 3 in a cluster of three. Existing ones are raised to it.",
    )
    home: Path = Field(default=Path("~/.thaw"), description="State directory of this machine.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severe level logged.")
    log_format: Literal["json", "text"] = Field(default="json", description="One JSON object a line, or text for people.")
    log_prompts: bool = Field(
        default=False, description="Gateways log requests with their prompts, and export them in spans (off: never)."
    )
    otlp_endpoint: str | None = Field(default=None, description="OTLP collector, e.g. http://127.0.0.1:4317; none: no export.")
    otlp_protocol: Literal["grpc", "http"] = Field(default="grpc", description="Protocol of the OTLP endpoint.")

    @property
    def state(self) -> Path:
        return self.home.expanduser().resolve()


class NodeSettings(CommonSettings):
    """Settings that the nodeagent, the loader and the engines of one node share."""

    node: str = Field(
        default="node-0", min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9-]*$", description="Name of this node."
    )

    @property
    def node_state(self) -> Path:
        """Return the directory of this node's state, which survives a crash.

        This node's processes use it to find each other again.
        """
        return self.state / "nodes" / self.node

    @property
    def scope(self) -> str:
        """Return a name of this node that is unique on the machine.

        Several meshes on a machine may use the same names for nodes and instances.
        """
        return f"{self.node}-{hashlib.sha256(str(self.node_state).encode()).hexdigest()[:8]}"


class StageSettings(NodeSettings):
    """Settings of the processes of one node that connect to those of other nodes."""

    stage_host: str = Field(
        default="127.0.0.1",
        description="Address on which a pipeline stage, or a rank of vLLM, listens, and which it publishes to the others; and on which an engine "
        "offers the KV cache of requests that move. Engines on several machines need one that the others reach; 0.0.0.0 and :: stand for the "
        "host's name.",
    )
