"""A model as the operator registers it (`ModelSpec`), as its files say (`ModelInfo`), and both together (`ModelCard`)."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from shared.contracts.base import Frozen

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/@-]{0,199}$"
Engine = Literal["builtin"]
ROUTES: dict[Engine, tuple[str, ...]] = {"builtin": ()}
"""The paths under /v1/ that each engine serves besides chat and text completions and embeddings."""


class Strict(Frozen):
    """A value that a person writes: unknown keys are faults, not future fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Replicas(Strict):
    min: int = Field(default=0, ge=0, le=1024)
    max: int = Field(default=1, ge=1, le=1024)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is over max ({self.max})")
        return self


class QueueLimits(Strict):
    max_waiting: int = Field(default=256, ge=1, le=100_000, description="Requests that may wait for the model in one gateway.")
    timeout: float = Field(default=300.0, gt=0, description="Seconds a request may wait.")


class Slo(Strict):
    ttft: float | None = Field(default=None, gt=0, description="Seconds to the first token.")
    tpot: float | None = Field(default=None, gt=0, description="Seconds for each token after it.")
    percentile: float = Field(default=0.98, gt=0, lt=1)


class ModelOptions(Strict):
    """What may be said of one model, and of all of them under `defaults:` in thaw.yaml."""

    engine: Engine = "builtin"
    keep_alive: float = Field(default=300.0, description="Seconds an idle instance stays on its device; -1: until evicted.")
    replicas: Replicas = Replicas()
    priority: int = Field(default=0, ge=-100, le=100, description="Higher is served first.")
    pin: bool = Field(default=False, description="Never evicted.")
    max_model_len: int | None = Field(default=None, gt=0, description="Context in tokens; the model's own by default.")
    max_concurrency: int = Field(default=16, ge=1, le=4096, description="Sequences an instance runs at once.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    queue: QueueLimits = QueueLimits()
    slo: Slo = Slo()
    latency_sensitivity: float = Field(default=1.0, gt=0)
    isolation: Literal["shared", "dedicated"] = "shared"
    init_timeout: float = Field(default=600.0, gt=0, description="Seconds a start may take without progress.")
    response_timeout: float = Field(default=600.0, gt=0, description="Seconds one response may take.")
    engine_args: dict[str, Any] = Field(default_factory=dict)
    trust_remote_code: bool = False

    @field_validator("keep_alive")
    @classmethod
    def _keep_alive(cls, value: float) -> float:
        if value < 0 and value != -1:
            raise ValueError("must be a number of seconds, 0 or more, or -1 for 'until evicted'")
        return value

    @field_validator("engine_args")
    @classmethod
    def _engine_args(cls, value: dict[str, Any]) -> dict[str, Any]:
        kv = value.get("kv_cache_bytes")
        if "kv_cache_bytes" in value and (isinstance(kv, bool) or not isinstance(kv, int) or kv < 1):
            raise ValueError("kv_cache_bytes must be a whole number of bytes, 1 or more")
        return value


class ModelSpec(ModelOptions):
    """One entry of `models:`. With `base` it is a LoRA adapter, which runs in that model's instances: the options that make an instance
    what it is are then the base's."""

    name: str = Field(pattern=NAME_PATTERN)
    source: str = Field(min_length=1, description="A directory in Hugging Face layout, or hf://org/name[@revision].")
    aliases: tuple[str, ...] = ()
    base: str | None = Field(default=None, pattern=NAME_PATTERN, description="The model that this LoRA adapter is for.")

    @field_validator("aliases")
    @classmethod
    def _aliases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        import re

        for alias in value:
            if not re.match(NAME_PATTERN, alias):
                raise ValueError(f"alias {alias!r} must match {NAME_PATTERN}")
        return value


class LinearShape(Frozen):
    """Weight matrices of one kind: `name` is their module's, each number in it as `*`."""

    name: str
    rows: int
    columns: int
    count: int = Field(default=1, description="How many there are.")


class AdapterInfo(Frozen):
    """What a LoRA adapter's files say (PEFT's adapter_config.json). `modules`: what it adds to, `rows` outputs by `columns` inputs."""

    rank: int = Field(gt=0)
    alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    made_for: str = Field(default="", description="base_model_name_or_path, as its author's files call the base.")
    modules: tuple[LinearShape, ...] = ()


class ModelInfo(Frozen):
    """What the loader read from a model's files (no weights are read for it)."""

    source: str = Field(description="The source as resolved: an absolute directory, or hf:// with its commit.")
    revision: str = Field(description="Digest that changes when any weight file does; two equal ones may share memory.")
    architecture: str
    model_type: str
    task: Literal["generate", "embed"]
    weights_bytes: int = Field(ge=0)
    parameters: int = Field(ge=0)
    dtype: str
    context_length: int = Field(gt=0)
    kv_bytes_per_token: int = Field(ge=0)
    has_chat_template: bool = False
    files: int = Field(default=1, ge=1)
    modules: tuple[LinearShape, ...] = Field(default=(), description="The weight matrices that an adapter may add to.")
    adapter: AdapterInfo | None = Field(default=None, description="Of a LoRA adapter; its other values are then its base's.")


class ModelCard(Frozen):
    """A registered model, as every process knows it."""

    spec: ModelSpec
    info: ModelInfo
    created: int = Field(description="Unix seconds of the registration.")
    generation: int = Field(default=1, description="Counts changes of the spec or the files.")
    routes: tuple[str, ...] = Field(default=(), description="Paths that its engine declares besides OpenAI's three, as /v1/rerank.")

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together."""
        own = self.info.context_length
        return min(own, self.spec.max_model_len) if self.spec.max_model_len else own
