"""Events and effects of the migration state machine, as plain data."""

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
    """The error that answered `Ask.key`, or that replaced an answer."""

    key: str
    error: ErrorBody


@dataclass(frozen=True, slots=True)
class Lost:
    """The migrator does not own the record any more.

    Attributes:
        over: The migration was cancelled, or its record removed; False: another owner has it.
    """

    over: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = Answered | Refused | Lost | Tick


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request to an engine or a gateway; `Answered` or `Refused` follows."""

    key: str
    to: Literal["engine", "gateway"]
    address: str
    message: Request


@dataclass(frozen=True, slots=True)
class Save:
    """Write the record. Only the newest version matters."""

    record: MigrationRecord


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop prepared resume state at the destination, which else expires by itself."""

    instance_id: str
    message: ForgetResume


@dataclass(frozen=True, slots=True)
class Link:
    """Link the migration's trace to this request's."""

    traceparent: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The work ends here.

    Attributes:
        lost: Another owner continues it.
    """

    record: MigrationRecord
    lost: bool = False


Effect = Ask | Save | Forget | Link | Ended
