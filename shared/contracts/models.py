"""Define a model's specification and its card.

`ModelSpec` is the operator's registration, `ModelInfo` (`model_info`) the content of the files, and
`ModelCard` has both.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import ConfigDict, Field, field_validator, model_validator

from shared.contracts.base import Frozen
from shared.contracts.engines import CAPABILITIES, Capabilities, Engine, ToolFormat
from shared.contracts.model_info import ModelInfo
from shared.contracts.stages import LayerRange, RankOf, split_layers
from shared.tool_calls.families import ALIASES

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/@-]{0,199}$"
ENGINE_SOURCE = "engine://"
"""Begins a source that only the engine can resolve, as engine://qwen3:0.6b for Ollama: nothing is
read or fetched for it.
"""
OPERATORS_FIELDS = ("command", "env", "container")
"""Options that decide what a node runs: taken from a thaw.yaml or the admin API, and there only
where the operator allows it.
"""

_HARMLESS_FIELDS = frozenset(
    {
        "name", "source", "aliases", "base", "engine", "keep_alive", "replicas", "priority", "park", "pin", "placement", "max_model_len",
        "max_concurrency", "stages", "dtype", "queue", "slo", "latency_sensitivity", "isolation", "init_timeout", "response_timeout", "memory",
        "health", "owner", "ready_timeout", "stop_signal", "routes", "tool_parser",
    }
)  # fmt: skip
"""Options of a model that can make no node run code of the caller's choice. An option that is new
here counts as one that can.
"""


class Strict(Frozen):
    """A value that a person writes: unknown keys are faults, not future fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Replicas(Strict):
    min: int = Field(default=0, ge=0, le=1024, description="Instances that stay ready without requests.")
    max: int = Field(default=1, ge=1, le=1024, description="Instances at most.")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is over max ({self.max})")
        return self


class QueueLimits(Strict):
    max_waiting: int = Field(default=256, ge=1, le=100_000, description="Requests that may wait for the model in one gateway.")
    timeout: float = Field(default=300.0, gt=0, description="Seconds a request may wait.")


class Slo(Strict):
    ttft: float | None = Field(default=None, gt=0, description="Seconds to the first token.")
    tpot: float | None = Field(default=None, gt=0, description="Seconds for each token after it.")
    percentile: float = Field(default=0.98, gt=0, lt=1, description="Share of requests that should meet it.")

    @property
    def is_set(self) -> bool:
        return self.ttft is not None or self.tpot is not None


HIDDEN = "***"
"""Value of an environment variable that the caller may not see."""


_AUTHORITY = re.compile(r"(?:.*@)?([^@:\[\]]*(?::\d*)?|\[[^\[\]]*\](?::\d*)?)", re.DOTALL)


def strip_credentials(source: str) -> str:
    """Remove user, password and query, which may be secrets, from a URL.

    Of a URL that cannot be parsed the scheme is left: a password with a slash ends its authority.
    """
    scheme, separator, _ = source.partition("://")
    if not separator or source.startswith(("hf://", ENGINE_SOURCE)):
        return source
    try:
        parts = urlsplit(source)
    except ValueError:
        return f"{scheme}://"
    authority = _AUTHORITY.fullmatch(parts.netloc)
    return urlunsplit((parts.scheme, authority[1], parts.path, "", "")) if authority else f"{scheme}://"


class ContainerOptions(Strict):
    """An engine as a container of the node's Docker or Podman.

    The model's directory is mounted read-only at its own path.
    """

    image: str = Field(min_length=1, description="Image of the engine's container.")
    entrypoint: tuple[str, ...] = Field(default=(), description="Instead of the image's own.")
    args: tuple[str, ...] | None = Field(
        default=None, description="Arguments, with the same fill-ins as `command`; by default what the engine's driver passes."
    )
    port: int = Field(
        default=8000, ge=1, le=65535, description="Port that the engine listens on inside, where it does not listen on {socket}."
    )
    mounts: tuple[str, ...] = Field(default=(), description="More of the host's paths, as /host:/inside or /host:/inside:rw.")
    shm_bytes: int = Field(default=1 << 30, gt=0, description="Size of /dev/shm inside.")
    runtime: str | None = Field(
        default=None, description="Runtime of the container engine, as nvidia or runsc; by default the container engine's own."
    )
    user: str | None = Field(default=None, description="User that its processes run as, as 1000:1000; by default the image's.")
    capabilities: tuple[str, ...] = Field(
        default=(), description="Linux capabilities that it keeps, as DAC_OVERRIDE; by default none, root's of the image neither."
    )
    memory_limit_bytes: int | None = Field(
        default=None, gt=0, description="Memory of the host that it may use; by default nine tenths of the machine's."
    )
    pids_limit: int = Field(default=8192, gt=0, description="Processes and threads that it may have.")
    pull: Literal["never", "missing"] = Field(default="missing", description="missing: pull the image if the node lacks it; never.")

    @field_validator("mounts")
    @classmethod
    def _mounts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for mount in value:
            parts = mount.split(":")
            if len(parts) not in (2, 3) or not all(p.startswith("/") for p in parts[:2]) or parts[2:] not in ([], ["ro"], ["rw"]):
                raise ValueError(f"{mount!r} is not /host:/inside, /host:/inside:ro or /host:/inside:rw")
        return value


class PlacementRules(Strict):
    """Constraints on the placement of a model's instances.

    Every rule must hold; each device that one excludes is shown with it by `thaw explain`.
    """

    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels that its nodes must have (THAW_LABELS), each with this value, or any for '*'.",
    )
    devices: tuple[str, ...] = Field(
        default=(), description="Devices it may use, as patterns of node/device or of the device alone: gpu-*/cuda:0, cuda:*."
    )
    anti_affinity: tuple[str, ...] = Field(
        default=(),
        description="Patterns of models that it shares no node with, whichever of them is placed first; or label=value of nodes to keep off.",
    )
    spread: bool = Field(default=False, description="Place no two of its instances on the same node.")

    @field_validator("devices", "anti_affinity")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if not pattern.strip() or pattern != pattern.strip():
                raise ValueError(f"{pattern!r} is not a pattern: it is empty, or has spaces around it")
        return value

    @field_validator("labels")
    @classmethod
    def _check_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not name or "=" in name or name != name.strip():
                raise ValueError(f"{name!r} is not the name of a label: it is empty, has spaces around it, or an equals sign")
        return value

    @property
    def any(self) -> bool:
        return bool(self.labels or self.devices or self.anti_affinity or self.spread)


class ModelOptions(Strict):
    """Settings of one model, or of all under `defaults:` in thaw.yaml."""

    engine: Engine = Field(
        default="builtin",
        description="builtin, vllm, llamacpp, sglang, ollama, tensorrt-llm, or openai: any server of OpenAI's API.",
    )
    keep_alive: float = Field(default=300.0, description="Seconds an idle instance stays on its device; -1: until evicted.")
    replicas: Replicas = Replicas()
    priority: int = Field(default=0, ge=-100, le=100, description="From -100 to 100. Models of a higher priority are placed first.")
    park: bool = Field(
        default=False,
        description="Started, warmed and suspended before its first request, as soon as there is room and no request waits.",
    )
    pin: bool = Field(default=False, description="Never evicted.")
    placement: PlacementRules = PlacementRules()
    max_model_len: int | None = Field(default=None, gt=0, description="Context in tokens; the model's own by default.")
    max_concurrency: int = Field(default=16, ge=1, le=4096, description="Sequences an instance runs at once.")
    stages: int = Field(
        default=1,
        ge=1,
        le=8,
        description="Devices, of any nodes, that an instance is divided among. Builtin engine: pipeline stages, each with its layers. vLLM: "
        "ranks of its own launch over several nodes; tensor_parallel_size x pipeline_parallel_size in engine_args is their number.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of the weights in memory: auto (that of the files), float32, bfloat16 or float16."
    )
    tool_parser: ToolFormat | None = Field(
        default=None,
        description="The form of tool calls in its text (builtin engine); by default engine_args.tool_call_parser, which takes vLLM's "
        "names, or else that of its chat template.",
    )
    queue: QueueLimits = QueueLimits()
    slo: Slo = Slo()
    latency_sensitivity: float = Field(
        default=1.0, gt=0, description="Weight of the time that its users lose by an eviction: above 1 it is evicted later."
    )
    isolation: Literal["shared", "dedicated"] = Field(
        default="dedicated",
        description="shared: one process of a device hosts all such models (builtin engine, without trust_remote_code); dedicated: a "
        "process for each instance.",
    )
    owner: str = Field(
        default="",
        max_length=200,
        description="Name of the API key that is charged for the memory that its instances hold (docs/metering.md); by default none.",
    )
    init_timeout: float = Field(
        default=600.0, gt=0, description="Seconds a start may take without progress, and a suspension altogether."
    )
    response_timeout: float = Field(default=600.0, gt=0, description="Seconds one response may take.")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="Options of the engine, as it names them.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model's files contain.")
    memory: int | None = Field(
        default=None, gt=0, description="Bytes of its device that one instance needs; by default computed from the model's files."
    )
    command: tuple[str, ...] = Field(
        default=(),
        description="Program and arguments of an engine of your own; {model}, {name}, {host}, {port} and {socket} are filled in.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="For the engine's processes; ${NAME} stands for the node's own variable of that name."
    )
    network: Literal["private", "host"] | None = Field(
        default=None,
        description="Network namespace of the engine's processes. private: one of its own. host: the machine's. By default private, where the "
        "node may create network namespaces and the engine needs no other host; host with a `command`, hf://… or engine://….",
    )
    health: str = Field(
        default="",
        pattern=r"^(/\S*)?$",
        description="Path that answers 200 when the engine is ready; by default the one that its driver knows.",
    )
    ready_timeout: float | None = Field(
        default=None, gt=0, description="Seconds a start may take in all, however much progress it makes; no limit by default."
    )
    stop_signal: Literal["SIGTERM", "SIGINT", "SIGQUIT", "SIGKILL"] = Field(
        default="SIGTERM", description="Signal that asks the engine to stop; SIGKILL follows."
    )
    routes: tuple[str, ...] = Field(default=(), description="More paths that the engine serves, as /v1/rerank.")
    container: ContainerOptions | None = None

    @field_validator("routes")
    @classmethod
    def _routes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for route in value:
            if not route.startswith("/v1/"):
                raise ValueError(f"{route!r} must begin with /v1/")
        return value

    @field_validator("keep_alive")
    @classmethod
    def _keep_alive(cls, value: float) -> float:
        if value < 0 and value != -1:
            raise ValueError("must be a number of seconds, 0 or more, or -1 for 'until evicted'")
        return value

    @field_validator("engine_args")
    @classmethod
    def _engine_args(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in ("kv_cache_bytes", "adapter_cache_bytes"):
            size = value.get(name)
            if name in value and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(f"{name} must be a whole number of bytes, 1 or more")
        return value


class ModelSpec(ModelOptions):
    """One entry of `models:`.

    With `base` it is a LoRA adapter, which runs in that model's instances: the options that make an
    instance what it is are then the base's.
    """

    name: str = Field(pattern=NAME_PATTERN, description="Name of the model in requests.")
    source: str = Field(
        min_length=1,
        description="A directory in Hugging Face layout, hf://org/name[@revision], https://, s3://, gs://, az://, a .gguf file, or engine://NAME.",
    )
    aliases: tuple[str, ...] = Field(default=(), description="Other names that requests may use.")
    base: str | None = Field(default=None, pattern=NAME_PATTERN, description="The model that this LoRA adapter is for.")

    @field_validator("aliases")
    @classmethod
    def _aliases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for alias in value:
            if not re.fullmatch(NAME_PATTERN, alias):
                raise ValueError(f"alias {alias!r} must match {NAME_PATTERN}")
        return value

    @property
    def tool_call_parser(self) -> str | None:
        """The name of the form of tool calls that its options give (builtin engine)."""
        return self.tool_parser or self.engine_args.get("tool_call_parser")

    @model_validator(mode="after")
    def _engine_options(self) -> Self:
        ours = self.engine == "builtin"
        for name in (*OPERATORS_FIELDS, "health", "ready_timeout", "routes", "network"):
            if ours and getattr(self, name):
                raise ValueError(f"{name} is for engines other than builtin; name one with `engine:`")
        if self.stages > 1:
            self._check_stages(ours)
        given = self.engine_args.get("tool_call_parser")
        if ours and given is not None and (not isinstance(given, str) or given not in ALIASES):
            raise ValueError(f"tool_call_parser {given!r:.80} is not known. Use one of {', '.join(sorted(ALIASES))}")
        if self.engine == "openai" and not self.command and self.container is None:
            raise ValueError("engine: openai needs a command, or a container")
        if self.command and self.container is not None:
            raise ValueError("command and container exclude each other: arguments of a container are container.args")
        if self.source.startswith(ENGINE_SOURCE):
            self._check_engine_source(ours)
        elif not ours and "://" in self.source and not self.source.startswith("hf://"):
            raise ValueError(f"{self.engine} reads its model itself, from a directory, a .gguf file, hf://… or {ENGINE_SOURCE}…")
        return self

    def _check_stages(self, ours: bool) -> None:
        if not ours:
            self._check_ranks()
        for name in ("park", "trust_remote_code", "base") if ours else ("park", "base"):
            if getattr(self, name):
                raise ValueError(f"stages and {name} exclude each other")
        if self.isolation == "shared":
            raise ValueError("stages and isolation: shared exclude each other")

    def _check_ranks(self) -> None:
        if self.engine != "vllm":
            raise ValueError("stages are for the builtin engine and vllm; other engines run on the devices of one node")
        for name in ("command", "container"):
            if getattr(self, name):
                raise ValueError(f"stages and {name} exclude each other: Thaw adds the options of vLLM's launch over several nodes")
        if self.network == "private":
            raise ValueError("stages and network: private exclude each other: ranks connect to each other")
        sizes = [self.engine_args.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
        if math.prod(int(size) if str(size).isdecimal() else 0 for size in sizes) != self.stages:
            raise ValueError(
                f"stages: {self.stages} needs as many ranks: set engine_args.tensor_parallel_size, or pipeline_parallel_size, so that "
                f"their product is {self.stages}"
            )

    def _check_engine_source(self, ours: bool) -> None:
        if ours:
            raise ValueError(f"a source {ENGINE_SOURCE}… is for engines that find their models themselves")
        missing = [name for name in ("memory", "max_model_len") if getattr(self, name) is None]
        if missing:
            raise ValueError(f"with a source {ENGINE_SOURCE}… nothing can be read of the model: say its {' and '.join(missing)}")

    @property
    def public_source(self) -> str:
        """Remove user, password and query, which may be secrets, from the URL `source`."""
        return strip_credentials(self.source)

    def without_secrets(self) -> ModelSpec:
        """Return the spec for callers who may not change it: no credentials, no values of `env`."""
        return self.model_copy(update={"source": self.public_source, "env": dict.fromkeys(self.env, HIDDEN)})

    @property
    def loads_itself(self) -> bool:
        """True if the engine reads the weights itself, so the loader prepares nothing."""
        if self.engine == "vllm":
            return self.engine_args.get("load_format") != "thaw"
        return self.engine != "builtin"

    @property
    def may_share(self) -> bool:
        """True if instances may run in an executor: requested, the builtin engine, no own code."""
        return self.isolation == "shared" and self.engine == "builtin" and not self.trust_remote_code


class ModelCard(Frozen):
    """A registered model, as every process knows it."""

    spec: ModelSpec
    info: ModelInfo
    created: int = Field(description="Unix seconds of the registration.")
    generation: int = Field(default=1, description="Counts changes of the spec or the files.")
    routes: tuple[str, ...] = Field(default=(), description="Paths that its engine declares besides OpenAI's three, as /v1/rerank.")

    @field_validator("spec", mode="before")
    @classmethod
    def _spec_of_a_newer_peer(cls, value: Any) -> Any:
        """Ignore unknown fields of a specification from a newer scheduler.

        Unknown fields in a person's input are errors.
        """
        return ModelSpec.model_validate(value, extra="ignore") if isinstance(value, dict) else value

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def stages(self) -> tuple[LayerRange, ...]:
        """The layers of each stage, or the share of each rank; none: an instance has all layers."""
        layers = self.info.layers
        if self.spec.stages == 1 or layers is None or layers.count < self.spec.stages:
            return ()
        return split_layers(layers.count, self.spec.stages)

    @property
    def pipeline(self) -> tuple[LayerRange, ...]:
        """As `stages`, if each loads its part alone; none: the engine divides the model itself."""
        return self.stages if self.spec.engine == "builtin" else ()

    @property
    def ranks(self) -> tuple[RankOf | None, ...]:
        """The tensor-parallel place of each rank of a vLLM on several nodes.

        None for a rank that has whole tensors. vLLM numbers the ranks of one pipeline stage first.
        """
        if self.spec.engine != "vllm" or self.spec.stages == 1:
            return ()
        count = int(self.spec.engine_args.get("tensor_parallel_size", 1))
        return tuple(RankOf(index=i % count, count=count) if count > 1 else None for i in range(self.spec.stages))

    def without_secrets(self) -> ModelCard:
        """Return the card for callers who may see, not change."""
        info = self.info.model_copy(update={"source": strip_credentials(self.info.source)})
        return self.model_copy(update={"spec": self.spec.without_secrets(), "info": info})

    def in_stages(self, count: int) -> ModelCard:
        """Return the card of an instance of `count` stages, whatever the model's own setting."""
        if self.spec.stages == count:
            return self
        return self.model_copy(update={"spec": self.spec.model_copy(update={"stages": count})})

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES[self.spec.engine]

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together."""
        own = self.info.context_length
        return min(own, self.spec.max_model_len) if self.spec.max_model_len else own


def routes_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the engine's additional paths under /v1/.

    Completions (text and chat) and embeddings are not among them.
    """
    return tuple(dict.fromkeys((*CAPABILITIES[spec.engine].routes, *spec.routes)))


def code_fields(spec: ModelSpec) -> tuple[str, ...]:
    """Return the options set in `spec` that can make a node run code.

    Arguments of the builtin engine are not among them.
    """
    fields = (f for f in ModelSpec.model_fields if f not in _HARMLESS_FIELDS)
    return tuple(f for f in fields if getattr(spec, f) and not (f == "engine_args" and spec.engine == "builtin"))
