"""Define the base of all messages, and the common failure and acknowledgement."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

CONTRACT_VERSION = "1.0"


class Frozen(BaseModel):
    """A value inside a message.

    Unknown fields are dropped, so that a peer one minor version ahead is understood.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")


class Message(Frozen):
    """One message on the wire, as JSON.

    `kind` distinguishes messages of one subject; `v` is the contract's version.

    A new field needs a default (the previous minor version does not send it); a changed meaning
    needs a new major.
    """

    v: str = CONTRACT_VERSION


Deadline = Annotated[int, Field(gt=0)]
"""Milliseconds from the sending."""


class Request(Message):
    """A message that expects a reply within `deadline_ms`.

    The deadline is a duration, because clocks are never compared across hosts.
    """

    deadline_ms: Deadline = 5_000
    """A kind of message that takes longer has another default."""

    @classmethod
    def usual_ms(cls) -> int:
        """Return the default deadline of this kind of message in milliseconds."""
        usual: int = cls.model_fields["deadline_ms"].default
        return usual


class ErrorBody(Frozen):
    """A `shared.errors.ThawError` on the wire."""

    code: str
    message: str
    status: int = 500
    type: str = "server_error"
    param: str | None = None
    retry_after_ms: int | None = None
    should_retry: bool | None = None


class Failure(Message):
    """The reply to any request that could not be done."""

    kind: Literal["failure"] = "failure"
    error: ErrorBody


class Done(Message):
    """The reply to a request that was performed and returns nothing."""

    kind: Literal["done"] = "done"
