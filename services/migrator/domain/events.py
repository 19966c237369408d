"""What the machine hears and what it has done, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.contracts.base import ErrorBody, Message, Request
from shared.contracts.migration import ForgetResume, MigrationRecord


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to `Ask.key`."""

    key: str
    reply: Message


@dataclass(frozen=True, slots=True)
class Refused:
    """The error that `Ask.key` was answered with, or what became of it instead of an answer."""

    key: str
    error: ErrorBody


@dataclass(frozen=True, slots=True)
class Lost:
    """The record is somebody else's now; or `over`: it was called off, or is not there any more."""

    over: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = Answered | Refused | Lost | Tick


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask an engine or a gateway something; what becomes of it comes back as `Answered` or `Refused`."""

    key: str
    to: Literal["engine", "gateway"]
    address: str
    message: Request


@dataclass(frozen=True, slots=True)
class Save:
    """Write the record. Only the newest matters."""

    record: MigrationRecord


@dataclass(frozen=True, slots=True)
class Forget:
    """Let the destination give up memory, now if it can be reached; by itself later."""

    instance_id: str
    message: ForgetResume


@dataclass(frozen=True, slots=True)
class Link:
    """The migration's trace belongs together with this request's."""

    traceparent: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more will be done here. `lost`: somebody else goes on with it."""

    record: MigrationRecord
    lost: bool = False


Effect = Ask | Save | Forget | Link | Ended
