"""Messages to executors: processes with several instances of the builtin engine.

A nodeagent starts an executor as it starts an engine, by a line on the zygote's socket
(`ExecutorStart`). From then on it sends commands on the executor's control subject. The
instances of an executor send the same reports and replies as dedicated engines
(shared/contracts/engine.py).
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shared.contracts.base import Deadline, Message, Request
from shared.contracts.engine import EngineStart

CURRENT_BYTES = 256
"""Length of the computing instance's id in `ExecutorStart.current_path`, padded with zero bytes."""
STEP_BEGAN = struct.Struct("<q")
"""The time at which its step began follows the id: nanoseconds of the monotonic clock; 0: none."""


class ExecutorStart(Message):
    """Start an executor.

    Attributes:
        current_path: The executor writes the id of the computing instance into this file, and when
            its step began, so that the nodeagent knows them after a crash or while a step does not
            end. The file has zero bytes while none computes.
    """

    kind: Literal["executor"] = "executor"
    executor_id: str
    node: str
    device: str
    log_path: str
    current_path: str
    environment: dict[str, str] = Field(default_factory=dict, description="THAW_ settings for the process.")

    @property
    def instance_id(self) -> str:
        """The name of the process in the zygote's replies."""
        return self.executor_id


class AttachInstance(Request):
    """Serve one more instance. The reply, `InstanceAttached`, precedes the instance's readiness.

    Repeating the command is harmless.
    """

    deadline_ms: Deadline = 10_000
    kind: Literal["attach"] = "attach"
    start: EngineStart


class InstanceAttached(Message):
    kind: Literal["attached"] = "attached"
    pid: int


class DetachInstance(Request):
    """End an instance: running requests fail, its weights are unmapped.

    The reply is `InstanceDetached`, or `engine_failed` if its memory is still mapped. Repeating the
    command is harmless, and so is an unknown instance.
    """

    deadline_ms: Deadline = 10_000
    kind: Literal["detach"] = "detach"
    instance_id: str


class InstanceDetached(Message):
    """The process no longer maps the instance's weights.

    Attributes:
        freed_bytes: Private memory that the process has freed.
    """

    kind: Literal["detached"] = "detached"
    freed_bytes: int = 0
    took_ms: float = 0.0


class PingExecutor(Request):
    kind: Literal["ping_executor"] = "ping_executor"


class ExecutorReport(Message):
    """The reply to `PingExecutor`."""

    kind: Literal["executor_report"] = "executor_report"
    executor_id: str
    pid: int
    instances: tuple[str, ...] = ()


ExecutorControl = Annotated[AttachInstance | DetachInstance | PingExecutor, Field(discriminator="kind")]
EXECUTOR_CONTROL: TypeAdapter[ExecutorControl] = TypeAdapter(ExecutorControl)
PROCESS_START: TypeAdapter[EngineStart | ExecutorStart] = TypeAdapter(
    Annotated[EngineStart | ExecutorStart, Field(discriminator="kind")]
)
"""The first message to a process of the builtin engine."""


def parse_current(data: bytes) -> tuple[str, int]:
    """Return the computing instance and when its step began.

    Args:
        data: The content of `ExecutorStart.current_path`. Executors of earlier versions write no
            time.

    Returns:
        The instance's id, empty if none computes, and nanoseconds of the monotonic clock, 0 if
        unknown.
    """
    name = data[:CURRENT_BYTES].rstrip(b"\0").decode(errors="replace")
    began = data[CURRENT_BYTES : CURRENT_BYTES + STEP_BEGAN.size]
    return name, STEP_BEGAN.unpack(began)[0] if len(began) == STEP_BEGAN.size else 0
