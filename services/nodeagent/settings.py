"""Settings of the nodeagent."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, field_validator

from services.nodeagent.settings_syntax import labels, parse_bytes, parse_devices
from shared.settings import NodeSettings

SPARE_CAPABLE = ("vllm",)
PROBE_EVERY_S, PROBE_WITHIN_S = 1.0, 2
"""Seconds between probes of the connection to NATS while engines are adopted, and for an answer.

Engines that do not answer are to blame only if NATS answers this agent.
"""


class NodeagentSettings(NodeSettings):
    devices: str = Field(
        default="auto",
        description="Devices and their budgets, e.g. 'cpu:0=1500MiB' or 'cuda:0=90%,cuda:1'; auto: cpu:0 and every CUDA device; on several NUMA "
        "nodes a separate cpu device for each instead of cpu:0. "
        "'cpu:1=4GiB/separate': a cpu device with memory of its own, which weights are copied into and stay in for reuse.",
    )
    cpu_share: float = Field(default=0.7, gt=0, le=1, description="Share of the available host memory that cpu:0 gets by default.")
    cpu_reserve: str = Field(default="512MiB", description="Host memory left alone before that share is taken.")
    cuda_share: float = Field(default=0.9, gt=0, le=1, description="Share of a CUDA device's memory that is its budget by default.")
    labels: str = Field(default="", description="Labels of this node, e.g. 'zone=a,rack=12'.")
    zygote: bool = Field(
        default=True, description="Fork engines from a process that has their imports done; off: start each as a new interpreter."
    )
    engine_module: str = Field(default="services.engine", description="Module run for each engine where zygote is off.")
    zygote_module: str = Field(default="services.engine.zygote", description="Module run as the zygote.")
    host_module: str = Field(
        default="services.enginehost", description="Module run for each instance of an engine other than the builtin one."
    )
    spare_engines: str = Field(
        default="",
        description="Engines of which an interpreter waits with its imports done, joined by commas: vllm. Starts are sooner; it holds some "
        "500 MB of host memory.",
    )
    templates: int = Field(
        default=4,
        ge=0,
        description="Suspended engines, one of each template key, that may change their model for one that has none; 0: none may.",
    )
    engine_threads: int = Field(
        default_factory=lambda: os.cpu_count() or 1, ge=1, description="Compute threads of an engine on cpu; all cores by default."
    )
    stop_timeout: float = Field(default=10.0, ge=0, description="Seconds running requests get when the nodeagent is stopped.")
    adopt_timeout: float = Field(
        default=20.0,
        gt=PROBE_EVERY_S + PROBE_WITHIN_S,
        description="Seconds an engine has to answer a restarted nodeagent; then it is ended. One whose connection to NATS is half-open may "
        "notice that only after 15 s.",
    )
    engine_log_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=64 * 1024,
        description="Largest log of an engine, the zygote or the spares; what is larger is moved to one older file beside it.",
    )
    step_timeout: float = Field(
        default=120.0,
        gt=0,
        description="Seconds that one step of a model in an executor may take; then the executor is ended, and the model gets a process of "
        "its own.",
    )
    kill_grace: float = Field(default=5.0, gt=0, description="Seconds from SIGTERM to SIGKILL.")

    suspend: Literal["auto", "sleep", "off"] = Field(
        default="auto",
        description="auto: instances are suspended rather than stopped where that is possible and worth it; sleep: only by an "
        "engine's own means; off: never.",
    )
    snapshot_bytes: str = Field(
        default="auto",
        description="Host memory and swap that suspended instances may take, e.g. '8GiB'; auto: all swap, and a quarter of the available "
        "memory.",
    )
    resume_timeout: float = Field(
        default=30.0,
        gt=0,
        description="Seconds a suspended engine has to answer again (or three times as long as expected, if that is more); then it is "
        "started cold.",
    )

    @field_validator("spare_engines")
    @classmethod
    def _spare_engines(cls, value: str) -> str:
        if unknown := {e.strip() for e in value.split(",")} - {"", *SPARE_CAPABLE}:
            raise ValueError(f"{', '.join(sorted(unknown))} cannot have spare interpreters; {', '.join(SPARE_CAPABLE)} can")
        return value

    @property
    def spares(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(e.strip() for e in self.spare_engines.split(",") if e.strip()))

    @field_validator("snapshot_bytes")
    @classmethod
    def _snapshot_bytes(cls, value: str) -> str:
        if value != "auto":
            parse_bytes(value)
        return value

    @field_validator("devices")
    @classmethod
    def _devices(cls, value: str) -> str:
        parse_devices(value)
        return value

    @field_validator("cpu_reserve")
    @classmethod
    def _reserve(cls, value: str) -> str:
        parse_bytes(value)
        return value

    @field_validator("labels")
    @classmethod
    def _labels(cls, value: str) -> str:
        labels(value)
        return value
