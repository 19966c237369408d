"""Read the log files of a node over the mesh: engines, and services whose launcher writes files.

Logs may contain prompts and secrets: gateways serve them to admin keys only.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shared.contracts.base import Frozen, Message, Request

MAX_LINES = 2_000
MAX_BYTES = 256 * 1024
"""Most bytes of a log that one reply has. As JSON they may become three times as many."""


class ListLogs(Request):
    """List the logs of the node, the most recently written first."""

    kind: Literal["list_logs"] = "list_logs"


class LogFile(Frozen):
    name: str = Field(description="As i-1a.node-0.engine, zygote, or loader.node-0.")
    nbytes: int
    model: str | None = Field(default=None, description="Of the instance whose engine writes it.")


class LogsListed(Message):
    kind: Literal["logs_listed"] = "logs_listed"
    node: str
    logs: tuple[LogFile, ...] = ()


class ReadLog(Request):
    """Read the last lines of a log, or those after an earlier reply's `position`."""

    kind: Literal["read_log"] = "read_log"
    name: str = Field(min_length=1, max_length=512)
    lines: int = Field(default=200, ge=1, le=MAX_LINES)
    after: int | None = Field(default=None, ge=0)


class LogRead(Message):
    """A part of a log, without control characters.

    Attributes:
        lines: Complete lines.
        rest: The beginning of a line that has not ended yet.
        position: Of `rest` in the file, in bytes.
        skipped: Lines before these were left out, or the log was rotated since `after`.
    """

    kind: Literal["log_read"] = "log_read"
    node: str
    name: str
    lines: tuple[str, ...] = ()
    rest: str = ""
    position: int = 0
    skipped: bool = False


LogRequest = Annotated[ListLogs | ReadLog, Field(discriminator="kind")]
LOG_REQUEST: TypeAdapter[LogRequest] = TypeAdapter(LogRequest)
