"""Every error that leaves a Thaw process, in one tree with stable wire codes.

    ThawError
    ├── InvalidRequest 400
    │   ├── ContextLengthExceeded
    │   └── UnsupportedParameter
    ├── AuthenticationFailed 401
    ├── PermissionDenied 403
    ├── NotFound 404
    │   └── ModelNotFound
    ├── Conflict 409
    │   ├── StaleToken            a command older than one already seen
    │   ├── InstanceDraining      the instance takes no new work
    │   ├── InstanceBusy          asked to leave only if idle, and it is not
    │   └── MigrationFailed       requests run on where they did, or elsewhere
    ├── PayloadTooLarge 413
    ├── InvalidModel 422          a registration or checkpoint that cannot work
    │   ├── CheckpointInvalid
    │   └── UnsupportedArchitecture
    ├── QueueFull 429
    ├── EngineFailed 500
    │   ├── EngineKilled          from outside, not for want of memory
    │   └── DeviceFailed          its GPU's driver does not answer
    ├── DeviceMissing 500
    ├── Unavailable 503
    │   ├── Unreachable           nobody listens on that subject
    │   ├── InsufficientMemory    it can never fit (or not now, see `should_retry`)
    │   ├── StoreFull             a bucket of NATS is at its bound
    │   └── ShuttingDown
    └── DeadlineExceeded 504
        └── QueueTimeout

A `ThawError` crosses the wire as `ErrorBody` (shared/contracts/base.py) and is raised again, with the same class, on the other side.
`should_retry` is what the OpenAI clients read from `x-should-retry`; None leaves their own rule in force.
"""

from __future__ import annotations

from typing import ClassVar, Self

from shared.contracts.base import ErrorBody

_LONGEST, _END = 8000, 2000
"""Characters of a message, and of them those kept of its end, where the remedy is. What a hostile file names may be as long as the file, and an
answer too long is never sent."""


def _shortened(message: str) -> str:
    if len(message) <= _LONGEST:
        return message
    cut = " … "
    return f"{message[: _LONGEST - _END - len(cut)]}{cut}{message[-_END:]}"


class ThawError(Exception):
    """Something went wrong inside Thaw; the message says what to do about it."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    retry: ClassVar[bool | None] = None

    def __init__(
        self,
        message: str = "",
        *,
        param: str | None = None,
        retry_after_ms: int | None = None,
        should_retry: bool | None = None,
    ) -> None:
        self.message = _shortened(message or (self.__doc__ or self.code).split("\n", 1)[0])
        self.param = param
        self.retry_after_ms = retry_after_ms
        self.should_retry = self.retry if should_retry is None else should_retry
        super().__init__(self.message)

    def body(self) -> ErrorBody:
        return ErrorBody(
            code=self.code,
            message=self.message,
            status=self.status,
            type=self.type,
            param=self.param,
            retry_after_ms=self.retry_after_ms,
            should_retry=self.should_retry,
        )

    @classmethod
    def _build(cls, body: ErrorBody) -> Self:
        return cls(body.message, param=body.param, retry_after_ms=body.retry_after_ms, should_retry=body.should_retry)


class InvalidRequest(ThawError):
    """The request is malformed or has values outside what is allowed."""

    code, status, type = "invalid_request", 400, "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt and the tokens asked for do not fit the model's context."""

    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """A parameter would change the output and this engine cannot honour it."""

    code = "unsupported_parameter"


class AuthenticationFailed(ThawError):
    """No valid API key came with the request."""

    code, status, type = "invalid_api_key", 401, "authentication_error"


class PermissionDenied(ThawError):
    """The key is valid but not for this."""

    code, status, type = "permission_denied", 403, "permission_error"


class NotFound(ThawError):
    """There is no such thing."""

    code, status, type = "not_found", 404, "invalid_request_error"


class ModelNotFound(NotFound):
    """No model of that name is registered; `thaw models list` shows those that are."""

    code = "model_not_found"


class Conflict(ThawError):
    """The request does not fit the present state."""

    code, status, type, retry = "conflict", 409, "invalid_request_error", False


class StaleToken(Conflict):
    """The command carries a fencing token older than one already seen; a newer leader is in charge."""

    code = "stale_token"


class InstanceDraining(Conflict):
    """The instance is draining and takes no new request; send it to another one."""

    code = "instance_draining"


class InstanceBusy(Conflict):
    """The instance is serving and was asked to leave only if idle."""

    code = "instance_busy"


class MigrationFailed(Conflict):
    """Not everything could be moved; what was not runs on where it did, or elsewhere."""

    code = "migration_failed"


class PayloadTooLarge(ThawError):
    """The body is over the limit."""

    code, status, type = "payload_too_large", 413, "invalid_request_error"


class InvalidModel(ThawError):
    """The model cannot be served as it is."""

    code, status, type, retry = "invalid_model", 422, "invalid_request_error", False


class CheckpointInvalid(InvalidModel):
    """The checkpoint is damaged or incomplete."""

    code = "checkpoint_invalid"


class UnsupportedArchitecture(InvalidModel):
    """The engine cannot run this architecture."""

    code = "unsupported_architecture"


class QueueFull(ThawError):
    """Too many requests are waiting for this model; try again later."""

    code, status, type = "queue_full", 429, "rate_limit_error"
    position: int | None = None
    """The place in the queue that the request would have had, counted from 1. Not on the wire: only a gateway refuses so."""


class EngineFailed(ThawError):
    """The engine stopped while it was starting or serving; `thaw logs nodeagent` says why."""

    code = "engine_failed"


class EngineKilled(EngineFailed):
    """The engine was killed from outside, or ended unseen, and not for want of memory: it says nothing of the model."""

    code = "engine_killed"


class DeviceFailed(EngineFailed):
    """The driver does not say what a device holds; `nvidia-smi` shows which, and the kernel's log (`dmesg`) why."""

    code = "device_failed"


class DeviceMissing(ThawError):
    """A device that was asked for is not there."""

    code = "device_missing"


class Unavailable(ThawError):
    """A part of the mesh that this needs is not there now."""

    code, status = "unavailable", 503


class Unreachable(Unavailable):
    """No process listens on that subject: it is stopped, or starting again."""

    code = "unreachable"


class InsufficientMemory(Unavailable):
    """The model does not fit any device."""

    code, retry = "insufficient_memory", False


class StoreFull(Unavailable):
    """The store has no room for another entry; docs/operations.md tells its bound and what makes room."""

    code, retry = "store_full", False


class ShuttingDown(Unavailable):
    """This process is shutting down; another one will answer a retry."""

    code, retry = "shutting_down", True


class DeadlineExceeded(ThawError):
    """No answer within the deadline."""

    code, status, type = "deadline_exceeded", 504, "timeout_error"


class QueueTimeout(DeadlineExceeded):
    """The request waited for its model longer than its queue allows."""

    code, retry = "queue_timeout", False


def _tree(root: type[ThawError]) -> dict[str, type[ThawError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_CODE = _tree(ThawError)


def from_body(body: ErrorBody) -> ThawError:
    """The exception that `body` was made from; an unknown code (a newer peer) becomes a plain `ThawError`."""
    return _BY_CODE.get(body.code, ThawError)._build(body)
