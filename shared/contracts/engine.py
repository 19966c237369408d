"""Between a nodeagent and the engine processes it started.

A nodeagent starts an engine by `EngineStart`, one JSON line on the zygote's Unix socket (or in a
file for `python -m services.engine`). The zygote answers each with `EngineForked` and reports an
exit to every connected nodeagent with `EngineExited`, also one line each. From then on they speak
NATS: the engine publishes `EngineReport` on its node's `engines` subject on every change and at
least every second, and answers on its control subject. An engine whose nodeagent is gone continues
to serve.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shared.contracts.base import Deadline, ErrorBody, Frozen, Message, Request
from shared.contracts.inference import CancelInfer
from shared.contracts.migration import ForgetResume, ListRequests, PrepareResume, ReadTokens, YieldInfer
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.stages import Stage

EngineState = Literal["loading", "ready", "asleep", "draining", "failed", "stopped"]
"""`asleep`: after `SleepEngine`, until `WakeEngine` is answered. Builtin engines never are."""


class EngineStart(Message):
    kind: Literal["start"] = "start"
    instance_id: str
    node: str
    card: ModelCard
    device: str
    devices: tuple[str, ...] = Field(default=(), description="All of its devices, `device` first; none: that one alone.")
    separate_memory: bool = Field(
        default=False, description="`device` is a cpu device with memory of its own: the loader copies the weights there."
    )
    separate_devices: tuple[str, ...] = Field(default=(), description="Those of `devices` for which that holds.")
    kv_bytes: int = Field(description="Bytes of KV cache the engine may hold.")
    kv_floor_bytes: int | None = Field(
        default=None,
        description="Of these, what is booked for the instance alone: on a device whose pages the KV cache borrows, it may be asked for "
        "the others. None: all are booked for it.",
    )
    stage: Stage | None = Field(
        default=None,
        description="The engine is this stage of a group; None: it serves alone. A first stage with a device for each stage starts the others.",
    )
    traceparent: str | None = None
    log_path: str
    environment: dict[str, str] = Field(default_factory=dict, description="THAW_ settings for the engine process.")
    charges_path: str | None = Field(
        default=None, description="File in which the engine keeps its meters (`shared.engines.charge_page`); None: in none."
    )
    cgroup_procs: str | None = Field(
        default=None, description="The cgroup.procs file of the instance's control group, which a hosted engine's processes join."
    )


class ZygoteReady(Message):
    """The zygote has imported its libraries; sent to each nodeagent that connects."""

    kind: Literal["ready"] = "ready"


class EngineForked(Message):
    kind: Literal["forked"] = "forked"
    instance_id: str
    pid: int


class EngineExited(Message):
    kind: Literal["exited"] = "exited"
    instance_id: str
    pid: int
    returncode: int = Field(description="Exit status; -N: ended by signal N.")


class ZygoteFailure(Message):
    kind: Literal["zygote_failure"] = "zygote_failure"
    instance_id: str = Field(description="Empty: the start could not be decoded, and has no readable name.")
    error: ErrorBody


ZYGOTE_LINE: TypeAdapter[ZygoteReady | EngineForked | EngineExited | ZygoteFailure] = TypeAdapter(
    Annotated[ZygoteReady | EngineForked | EngineExited | ZygoteFailure, Field(discriminator="kind")]
)


class LoadedAdapter(Frozen):
    """A LoRA adapter that an engine has in memory."""

    name: str
    nbytes: int
    active: int = Field(default=0, description="Requests that use it.")


class BackgroundWork(Frozen):
    """Seconds that an engine computed for no request, or for what a migration made necessary.

    Attributes:
        plan_id: The plan that needed the memory of migrated requests; empty: none.
        seconds: Of each of its devices, since the engine's start.
    """

    plan_id: str = ""
    seconds: float = Field(ge=0)


class EngineLoad(Frozen):
    """The present load of an engine."""

    active: int = 0
    waiting: int = 0
    completed: int = 0
    generated_tokens: int = 0
    kv_bytes_used: int = 0
    kv_bytes_wanted: int = Field(default=0, description="Of a KV cache that borrows pages: what its sequences need, known so far.")
    busy_s: float = Field(
        default=0.0,
        description="Seconds that it has computed since its start, measured apart from charges. 0 of engines that do not measure it.",
    )
    background: tuple[BackgroundWork, ...] = Field(
        default=(), description="The part of `busy_s` that is charged to no request. Causes of long ago are left out."
    )
    charged_s: float | None = Field(
        default=None,
        description="The part of `busy_s` that is charged to requests which have ended, as it was reported to their gateways. "
        "None of engines that do not count it.",
    )
    idle_ms: int = Field(default=0, description="Since the last request ended; 0 while there is one.")
    adapters: tuple[LoadedAdapter, ...] = ()


class HostedEngine(Frozen):
    """Properties of the engine behind a host process.

    They say which processes to freeze, measure and end, and which features the engine has itself.
    """

    pids: tuple[int, ...] = Field(default=(), description="Its processes, all that they forked included; not the host's own.")
    container: str | None = Field(default=None, description="Id of its container.")
    sleep_levels: tuple[int, ...] = Field(default=(), description="Of `SleepEngine`, as this engine on this device has them.")


class EngineReport(Message):
    """State of an engine, reported to its nodeagent.

    Attributes:
        phases: Phases of the start, relative to the time this message is sent; empty in reports
            after `ready` was acknowledged.
    """

    kind: Literal["report"] = "report"
    instance_id: str
    pid: int
    state: EngineState
    phase: Phase | None = None
    progress: float = Field(default=0.0, ge=0, le=1)
    load: EngineLoad = EngineLoad()
    phases: tuple[PhaseSpan, ...] = ()
    error: ErrorBody | None = None
    weights_id: str | None = None
    accepts_requests: bool = Field(
        default=False, description="While loading: it takes requests, and computes them as weights arrive."
    )
    hosted: HostedEngine | None = None
    fell_back: ErrorBody | None = Field(
        default=None, description="Why the engine of a template could not change its model; it was restarted then."
    )


class PingEngine(Request):
    kind: Literal["ping"] = "ping"


class DrainEngine(Request):
    """Take no new request; report `stopped` and exit once none is left.

    With `only_if_idle` a serving engine fails with `instance_busy` and continues to serve.
    """

    kind: Literal["drain"] = "drain"
    only_if_idle: bool = False
    reason: str = ""


class SleepEngine(Request):
    """Stop serving until `WakeEngine`, and give memory back.

    New requests are refused (`instance_draining`), and the health check pauses. Level 0 leaves the
    engine as it is, for a freezer or a checkpoint. Level 1 keeps the weights in host memory and
    frees the remaining device memory. Level 2 frees both.

    The reply is `EngineAsleep`. The request fails with `instance_busy` while requests are served
    (drain first), and with `unsupported_parameter` for a level that the engine lacks.
    """

    deadline_ms: Deadline = 60_000
    kind: Literal["sleep"] = "sleep"
    level: int = Field(default=0, ge=0, le=2)


class EngineAsleep(Message):
    kind: Literal["asleep"] = "asleep"
    level: int
    took_ms: float = 0.0


class WakeEngine(Request):
    """Undo `SleepEngine`, prove by tokens that the engine is unchanged, and serve.

    The request is harmless without a `SleepEngine` before. The reply is `EngineProbed`. If the
    engine does not wake or generates other tokens, the request fails with `engine_failed` and the
    engine stays asleep.
    """

    deadline_ms: Deadline = 120_000
    kind: Literal["wake"] = "wake"


class ProbeEngine(Request):
    """Generate a few tokens greedily (or embed a word), whatever the state.

    Answered with `EngineProbed`, or `engine_failed`.
    """

    deadline_ms: Deadline = 30_000
    kind: Literal["probe"] = "probe"


class ChangeModel(Request):
    """Have the engine serve another model of its template key (`shared.template_key`).

    The host process and its engine become the instance of `start`: it reports, and answers, under
    that id from then on. `Done` means that the change has begun. The request fails with
    `instance_busy` while requests are served, and with `unsupported_parameter` for an engine that
    cannot change its model. If the change itself fails, the host restarts the engine, once, and
    reports the reason as `EngineReport.fell_back`.
    """

    kind: Literal["change_model"] = "change_model"
    start: EngineStart


class EngineProbed(Message):
    """Result of a probe of an engine.

    Attributes:
        same: The answer was the same as when the engine became ready or, for one that has changed
            its model, as before it first slept.
    """

    kind: Literal["probed"] = "probed"
    same: bool
    took_ms: float = Field(description="Of the probe itself.")
    woke_ms: float = Field(default=0.0, description="With `WakeEngine`: of the engine's own waking, before the probe.")


class DropAdapter(Request):
    """The LoRA adapter is no longer registered: unload it once no request uses it.

    Harmless if it is not loaded.
    """

    kind: Literal["drop_adapter"] = "drop_adapter"
    name: str


class LoadAdapter(Request):
    """Load a LoRA adapter that requests wait for.

    The adapter's weights load beside the model's, and the engine attaches them as soon as the model
    is bound. The request has no effect if the adapter is loaded already. If the adapter cannot be
    loaded, the inference request for it gets the error.
    """

    kind: Literal["load_adapter"] = "load_adapter"
    card: ModelCard


EngineControl = Annotated[
    PingEngine
    | DrainEngine
    | CancelInfer
    | DropAdapter
    | LoadAdapter
    | SleepEngine
    | WakeEngine
    | ProbeEngine
    | ChangeModel
    | ListRequests
    | ReadTokens
    | PrepareResume
    | ForgetResume
    | YieldInfer,
    Field(discriminator="kind"),
]
ENGINE_CONTROL: TypeAdapter[EngineControl] = TypeAdapter(EngineControl)
