"""Settings of the migrator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.settings import CommonSettings


class MigratorSettings(CommonSettings):
    migrator_name: str = Field(default="", description="Name of this migrator in records and logs; host and process id by default.")
    migrate_at_once: int = Field(default=4, ge=1, description="Requests of one instance that are moved at the same time.")
    migrate_pause: float = Field(
        default=0.1,
        ge=0,
        description="Longest expected pause of a stream in seconds. Below it a request is handed over when more rounds gain nothing.",
    )
    migrate_kv: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="When a migration sends the KV cache instead of recomputing it: auto where that is predicted sooner, always where it is "
        "possible, or never.",
    )
    migrator_metrics_host: str = Field(default="127.0.0.1", description="Address of the migrator's Prometheus endpoint.")
    migrator_metrics_port: int | None = Field(
        default=None, ge=1, le=65535, description="Port of http://…/metrics with pauses, rounds and outcomes; none: no endpoint."
    )
