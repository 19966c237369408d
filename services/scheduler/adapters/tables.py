"""The scheduler's tables: columns for what is queried, JSONB for the rest."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator


class StorableText(TypeDecorator[str]):
    """Text whose NUL characters are replaced: PostgreSQL refuses them.

    The end of an engine's log, which is the error of a failed start, may have some.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}") if value is not None else None


metadata = MetaData()

models = Table(
    "models",
    metadata,
    Column("name", StorableText, primary_key=True),
    Column("card", JSONB, nullable=False),
    Column("error", StorableText),
    Column("resting", Boolean, nullable=False, server_default="false"),
)
nodes = Table(
    "nodes",
    metadata,
    Column("name", StorableText, primary_key=True),
    Column("boot_id", StorableText, nullable=False),
    Column("labels", JSONB, nullable=False),
    Column("cordoned", Boolean, nullable=False),
    Column("drain_since", Float),
)
devices = Table(
    "devices",
    metadata,
    Column("node", StorableText, primary_key=True),
    Column("device_id", StorableText, primary_key=True),
    Column("kind", StorableText, nullable=False),
    Column("name", StorableText, nullable=False),
    Column("budget_bytes", BigInteger, nullable=False),
)
instances = Table(
    "instances",
    metadata,
    Column("instance_id", StorableText, primary_key=True),
    Column("plan_id", StorableText, nullable=False),
    Column("model", StorableText, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("revision", StorableText, nullable=False),
    Column("node", StorableText, nullable=False),
    Column("device_ids", JSONB, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("reserve_bytes", BigInteger, nullable=False),
    Column("kv_bytes", BigInteger, nullable=False),
    Column("requested_at", Float, nullable=False),
    Column("planned_at", Float, nullable=False),
    Column("state", StorableText, nullable=False),
    Column("leaving", StorableText, nullable=False),
    Column("leave_reason", StorableText, nullable=False),
    Column("stop_at", Float),
    Column("sent_at", Float),
    Column("ready_at", Float),
    Column("trigger", StorableText, nullable=False),
    Column("traceparent", StorableText),
    Column("stages", Integer, nullable=False, server_default="1"),
)
plans = Table(
    "plans",
    metadata,
    Column("plan_id", StorableText, primary_key=True),
    Column("model", StorableText, nullable=False),
    Column("created", Float, nullable=False),
    Column("trigger", StorableText, nullable=False),
    Column("way", StorableText, nullable=False),
    Column("reason", StorableText, nullable=False),
    Column("instance_id", StorableText),
    Column("outcome", StorableText, nullable=False),
    Column("chosen", JSONB),
    Column("candidates", JSONB, nullable=False),
    Column("predicted", JSONB, nullable=False),
    Column("measured", JSONB, nullable=False),
    Column("measured_ms", Float),
    Column("error", JSONB),
    Column("traceparent", StorableText),
    Column("predicted_ms", Float),
    Column("error_ms", Float),
    Column("preempted", JSONB),
    Column("caused_by", StorableText),
    Index("plans_by_model", "model", "created"),
    Index("plans_by_age", "created"),
    Index("plans_by_instance", "instance_id", "created"),
)
parameters = Table(
    "parameters",
    metadata,
    Column("model", StorableText, primary_key=True),
    Column("node", StorableText, primary_key=True),
    Column("quantity", StorableText, primary_key=True),
    Column("value", Float, nullable=False),
    Column("error", Float, nullable=False),
    Column("count", Integer, nullable=False),
    Column("updated", Float, nullable=False, server_default=text("extract(epoch from clock_timestamp())")),
)
"""Learned parameters; an empty model or node stands for all of them."""
profiles = Table(
    "profiles",
    metadata,
    Column("model", StorableText, primary_key=True),
    Column("generation", Integer, nullable=False),
    Column("engine", StorableText, nullable=False),
    Column("by_kind", JSONB, nullable=False),
)
"""Measured memory of a model's instance, by kind of device."""
objectives = Table(
    "objectives",
    metadata,
    Column("model", StorableText, primary_key=True),
    Column("hours", JSONB, nullable=False),
    Column("applied", JSONB, nullable=False),
)
"""Requests that met their model's objective, by hour, and the last report of each gateway."""
residency = Table(
    "residency",
    metadata,
    Column("node", StorableText, primary_key=True),
    Column("weights_id", StorableText, primary_key=True),
    Column("tier", StorableText, primary_key=True),
    Column("nbytes", BigInteger, nullable=False),
    Column("heard_at", Float, nullable=False),
)
"""Loaders' last status. The tier is dram, ssd, or a device."""
links = Table(
    "links",
    metadata,
    Column("node", StorableText, primary_key=True),
    Column("link", StorableText, primary_key=True),
    Column("bytes_per_second", Float),
    Column("queued_bytes", BigInteger, nullable=False),
    Column("loads", Integer, nullable=False),
    Column("finish_ms", Float),
    Column("heard_at", Float, nullable=False),
)
usage = Table(
    "usage",
    metadata,
    Column("hour", Integer, primary_key=True),
    Column("key", StorableText, primary_key=True),
    Column("model", StorableText, primary_key=True),
    Column("adapter", StorableText, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cold_requests", BigInteger, nullable=False),
    Column("compute_cpu_us", BigInteger, nullable=False, server_default="0"),
    Column("compute_cuda_us", BigInteger, nullable=False, server_default="0"),
)
"""Usage of requests, by the hour of their end."""
cold_waits = Table(
    "cold_waits",
    metadata,
    Column("plan_id", StorableText, primary_key=True),
    Column("key", StorableText, primary_key=True),
    Column("model", StorableText, primary_key=True),
    Column("adapter", StorableText, primary_key=True),
    Column("hour", Integer, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("start_s", Float, nullable=False),
    Column("device_kind", StorableText, nullable=False, server_default=""),
    Column("devices", Integer, nullable=False, server_default="1"),
    Index("cold_waits_by_hour", "hour"),
)
"""Requests that waited for a start, which share its seconds."""
displacements = Table(
    "displacements",
    metadata,
    Column("plan_id", StorableText, primary_key=True),
    Column("payer", StorableText, primary_key=True),
    Column("hour", Integer, nullable=False),
    Column("key", StorableText, nullable=False),
    Column("model", StorableText, nullable=False),
    Column("victims", Integer, nullable=False),
    Column("clearing_s", Float, nullable=False),
    Column("restart_s", Float, nullable=False),
    Column("device_kind", StorableText, nullable=False),
    Column("devices", Integer, nullable=False),
    Index("displacements_by_payer", "payer"),
    Index("displacements_by_hour", "hour"),
)
"""Costs that starts caused to others. The requests that waited for the plan `payer` share them;
without such requests `key` pays, the owner of the payer's model.
"""
start_phases = Table(
    "start_phases",
    metadata,
    Column("plan_id", StorableText, primary_key=True),
    Column("phase", StorableText, primary_key=True),
    Column("hour", Integer, nullable=False),
    Column("share", Float, nullable=False),
    Index("start_phases_by_hour", "hour"),
)
"""Each phase's share of a start's seconds."""
usage_spools = Table(
    "usage_spools",
    metadata,
    Column("spool", StorableText, primary_key=True),
    Column("position", BigInteger, nullable=False),
    Column("hour", Integer, nullable=False),
)
"""How far each gateway's spool is recorded."""
metered_responses = Table(
    "metered_responses",
    metadata,
    Column("answer_id", StorableText, primary_key=True),
    Column("hour", Integer, nullable=False),
)
"""Responses that count already and that another gateway may report again."""
held_memory = Table(
    "held_memory",
    metadata,
    Column("hour", Integer, primary_key=True),
    Column("key", StorableText, primary_key=True),
    Column("model", StorableText, primary_key=True),
    Column("kind", StorableText, primary_key=True),
    Column("byte_s", Float, nullable=False),
)
"""Byte-seconds that instances held on devices (cpu, cuda), or suspended in host memory (host), and
those of cached weights (cache).
"""
held_clocks = Table("held_clocks", metadata, Column("node", StorableText, primary_key=True), Column("until", Float, nullable=False))
"""Unix seconds up to which each node's memory is recorded."""
background_work = Table(
    "background_work",
    metadata,
    Column("hour", Integer, primary_key=True),
    Column("key", StorableText, primary_key=True),
    Column("model", StorableText, primary_key=True),
    Column("plan_id", StorableText, primary_key=True),
    Column("device_kind", StorableText, primary_key=True),
    Column("us", BigInteger, nullable=False),
    Index("background_work_by_plan", "plan_id"),
)
"""Device time that is charged to no request. The requests that waited for the plan share it;
without such requests `key` pays.
"""
background_readings = Table(
    "background_readings",
    metadata,
    Column("engine", StorableText, primary_key=True),
    Column("plan_id", StorableText, primary_key=True),
    Column("us", BigInteger, nullable=False),
    Column("hour", Integer, nullable=False),
)
"""Latest readings of the engines' meters of such time, and of time charged to requests."""
device_accounts = Table(
    "device_accounts",
    metadata,
    Column("model", StorableText, primary_key=True),
    Column("device_kind", StorableText, primary_key=True),
    Column("charged_us", BigInteger, nullable=False),
    Column("recorded_us", BigInteger, nullable=False),
    Column("unrecorded_us", BigInteger, nullable=False),
    Column("hour", Integer, nullable=False),
)
"""Microseconds that engines have charged to requests, and that gateways have recorded of them."""
pulls = Table(
    "pulls",
    metadata,
    Column("key", StorableText, primary_key=True),
    Column("model", StorableText, nullable=False),
    Column("node", StorableText, nullable=False),
    Column("tier", StorableText, nullable=False),
    Column("weights_id", StorableText, nullable=False),
    Column("since", Float, nullable=False),
    Column("requests", JSONB, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("sent_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("answer", JSONB),
)
"""Operators' pulls in progress, and those of the last minute with their answers."""
leadership = Table("leadership", metadata, Column("id", Integer, primary_key=True), Column("epoch", BigInteger, nullable=False))
