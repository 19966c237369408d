"""Settings of the scheduler from its environment."""

from __future__ import annotations

from pydantic import Field, SecretStr, ValidationError, field_validator

from services.scheduler.domain.policy import Policy
from services.scheduler.profiles import profile_named
from shared.contracts.prices import Prices
from shared.errors import InvalidRequest
from shared.policies import DEFAULT_POLICY
from shared.settings import CommonSettings


class SchedulerSettings(CommonSettings):
    database_url: SecretStr = Field(
        default=SecretStr("postgresql://thaw@127.0.0.1:5432/thaw"),
        description="PostgreSQL, as postgresql://user:password@host:port/name (postgresql+asyncpg:// is accepted too). Several servers, as "
        "host:port,host:port: the one that accepts writes is used.",
    )
    scheduler_name: str = Field(default="", description="Name of this scheduler in views and logs; host and process id by default.")
    scheduler_metrics_host: str = Field(default="127.0.0.1", description="Address of the scheduler's Prometheus endpoint.")
    scheduler_metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Port of http://…/metrics with predictions and outcomes of plans; none: no endpoint.",
    )
    policy: str = Field(
        default=DEFAULT_POLICY, description="The scheduling policy, as `scheduler.policy` in thaw.yaml; see docs/scheduling.md."
    )
    preempt_after: float = Field(
        default=15.0, ge=0, description="Seconds a model waits before a serving, unpinned instance may be drained for it."
    )
    min_active: float = Field(
        default=2.0, ge=0, description="Seconds a new instance is safe from eviction while its own requests are on their way."
    )
    no_node_timeout: float = Field(
        default=30.0,
        gt=0,
        description="Seconds demand waits for any node, or for one that is large enough and has stopped, before its requests fail.",
    )
    drain_timeout: float = Field(default=60.0, ge=0, description="Seconds running requests of a draining instance may still take.")
    scale_up_after: float = Field(
        default=1.0, ge=0, description="Seconds demand must exceed the capacity of the present replicas before one more starts."
    )
    grant_wait: float = Field(
        default=10.0,
        ge=0,
        description="Seconds a start may wait on its node for memory of instances that stop there; 0: it is sent when they have stopped.",
    )
    park_at_once: int = Field(
        default=2, ge=0, description="Concurrent starts on a node of models that are parked before their first request; 0: none."
    )
    rebalance_every: float = Field(
        default=0.0,
        ge=0,
        description="Period in seconds of spreading hot models and packing cold ones by migrating requests; 0: never.",
    )
    consolidate: bool = Field(
        default=True,
        description="Make one instance of a pipeline group that the scheduler chose, while it serves, as soon as a device has room.",
    )
    prefetch: bool = Field(default=True, description="Prefetch weights of models that are likely to be requested to idle nodes.")
    command_timeout: float = Field(
        default=5.0, gt=0, description="Seconds a nodeagent may be unreachable before a start on it counts as failed."
    )
    prices: str = Field(
        default="",
        description="Prices of tokens and device-seconds as JSON, as `prices:` in thaw.yaml (docs/metering.md); empty: none.",
    )

    @field_validator("prices")
    @classmethod
    def _check_prices(cls, value: str) -> str:
        try:
            return Prices.model_validate_json(value).model_dump_json() if value else ""
        except ValidationError as e:
            first = e.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the text'}: {first['msg']}") from None

    @field_validator("database_url")
    @classmethod
    def _postgres(cls, value: SecretStr) -> SecretStr:
        scheme, separator, rest = value.get_secret_value().partition("://")
        if not (separator and rest and scheme in ("postgresql", "postgres", "postgresql+asyncpg")):
            raise ValueError("Thaw keeps its state in PostgreSQL: write postgresql://user:password@host:port/name")
        return value

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            return profile_named(value).name
        except InvalidRequest as e:
            raise ValueError(e.message) from None

    @property
    def price_list(self) -> Prices | None:
        return Prices.model_validate_json(self.prices) if self.prices else None

    def rules(self) -> Policy:
        """Return the policy for decisions."""
        return Policy(
            profile=profile_named(self.policy),
            preempt_after_s=self.preempt_after,
            min_active_s=self.min_active,
            no_node_timeout_s=self.no_node_timeout,
            drain_timeout_s=self.drain_timeout,
            scale_up_after_s=self.scale_up_after,
            grant_wait_s=self.grant_wait,
            park_concurrency=self.park_at_once,
            prefetch=self.prefetch,
            rebalance_period_s=self.rebalance_every,
            consolidate=self.consolidate,
        )
