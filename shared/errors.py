"""Every error that leaves a Thaw process, in one tree with stable wire codes.

    ThawError                   500 internal_error
    ├── InvalidRequest          400 invalid_request
    │   ├── ContextLengthExceeded   context_length_exceeded
    │   ├── UnsupportedParameter    unsupported_parameter
    │   ├── MethodNotAllowed    405 method_not_allowed
    │   ├── RequestTimeout      408 request_timeout           the client did not send it in time
    │   ├── UnsupportedMediaType 415 unsupported_media_type
    │   ├── IdempotencyKeyReused 422 idempotency_key_reused
    │   └── HeadersTooLarge     431 headers_too_large
    ├── AuthenticationFailed    401 invalid_api_key
    ├── PermissionDenied        403 permission_denied
    ├── NotFound                404 not_found
    │   └── ModelNotFound           model_not_found
    ├── Conflict                409 conflict
    │   ├── StaleToken              stale_token               a newer command was executed before
    │   ├── InstanceDraining        instance_draining         the instance accepts no new requests
    │   ├── InstanceBusy            instance_busy             it serves: not to be stopped now
    │   ├── MigrationFailed         migration_failed          requests stayed, or were re-run
    │   └── PullCancelled           pull_cancelled            an operator ended the pull
    ├── PayloadTooLarge         413 payload_too_large
    ├── InvalidModel            422 invalid_model             an unusable registration or checkpoint
    │   ├── CheckpointInvalid       checkpoint_invalid
    │   └── UnsupportedArchitecture unsupported_architecture
    ├── QueueFull               429 queue_full
    ├── TooManyConnections      429 too_many_connections
    ├── RateLimitExceeded       429 rate_limit_exceeded       a limit of the API key
    ├── InsufficientQuota       429 insufficient_quota        a budget of the API key
    ├── EngineFailed            500 engine_failed
    │   ├── EngineKilled            engine_killed             by another process, not out of memory
    │   ├── MemoryExceeded          memory_exceeded           by a model in an executor
    │   └── DeviceFailed            device_failed             the driver failed a call, or hangs
    ├── DeviceMissing           500 device_missing
    ├── CannotSuspend           500 cannot_suspend            the engine still runs
    ├── RestoreFailed           500 restore_failed            a suspended engine did not resume
    ├── Unavailable             503 unavailable
    │   ├── Unreachable             unreachable               no process subscribes to the subject
    │   ├── ReplyLost               reply_lost                the responder's reports have stopped
    │   ├── InsufficientMemory      insufficient_memory       never fits, or not now
    │   ├── BodyLost                body_lost                 no gateway holds the request's body
    │   ├── StoreFull               store_full                a NATS bucket or disk cache is full
    │   └── ShuttingDown            shutting_down
    └── DeadlineExceeded        504 deadline_exceeded
        └── QueueTimeout            queue_timeout

A `ThawError` crosses the wire as `ErrorBody` (shared/contracts/base.py) and is raised again, with
the same class, on the other side. `should_retry` is what the OpenAI clients read from
`x-should-retry`; None leaves their own rule in force.
"""

from __future__ import annotations

from typing import ClassVar, Self

from shared.contracts.base import ErrorBody

_MAX_CHARS, _TAIL_CHARS = 8000, 2000
"""Bounds of a message, and of its tail, which has the remedy. A hostile file can make names of any
length, and NATS refuses large messages.
"""


def _shorten(message: str) -> str:
    if len(message) <= _MAX_CHARS:
        return message
    cut = " … "
    return f"{message[: _MAX_CHARS - _TAIL_CHARS - len(cut)]}{cut}{message[-_TAIL_CHARS:]}"


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
        self.message = _shorten(message or (self.__doc__ or self.code).split("\n", 1)[0])
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
    """The prompt and the requested tokens exceed the model's context length."""

    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """A parameter would change the output and this engine cannot honour it."""

    code = "unsupported_parameter"


class MethodNotAllowed(InvalidRequest):
    """The route does not have this method."""

    code, status = "method_not_allowed", 405


class RequestTimeout(InvalidRequest):
    """The request did not arrive in time."""

    code, status = "request_timeout", 408


class UnsupportedMediaType(InvalidRequest):
    """The route does not read bodies of this media type."""

    code, status = "unsupported_media_type", 415


class IdempotencyKeyReused(InvalidRequest):
    """The Idempotency-Key was used before with another body."""

    code, status = "idempotency_key_reused", 422


class HeadersTooLarge(InvalidRequest):
    """The headers of the request are over the limit."""

    code, status = "headers_too_large", 431


class AuthenticationFailed(ThawError):
    """The request has no valid API key."""

    code, status, type = "invalid_api_key", 401, "authentication_error"


class PermissionDenied(ThawError):
    """The API key is valid but does not permit this request."""

    code, status, type = "permission_denied", 403, "permission_error"


class NotFound(ThawError):
    """The requested resource does not exist."""

    code, status, type = "not_found", 404, "invalid_request_error"


class ModelNotFound(NotFound):
    """No model of that name is registered; `thaw models list` shows those that are."""

    code = "model_not_found"


class Conflict(ThawError):
    """The request conflicts with the present state."""

    code, status, type, retry = "conflict", 409, "invalid_request_error", False


class StaleToken(Conflict):
    """The command's fencing token is older than one already seen; a newer leader has taken over."""

    code = "stale_token"


class InstanceDraining(Conflict):
    """The instance is draining and takes no new request; send it to another one."""

    code = "instance_draining"


class InstanceBusy(Conflict):
    """The instance serves requests, and was to be stopped only if idle."""

    code = "instance_busy"


class MigrationFailed(Conflict):
    """Some requests were not moved; they continue on their instance, or on another one."""

    code = "migration_failed"


class PullCancelled(Conflict):
    """The pull was cancelled; what was fetched stays on the disk, and a repeated pull continues."""

    code = "pull_cancelled"


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
    """The place in the queue that the request would have had, counted from 1. Not on the wire: only
    a gateway raises it.
    """
    limit: str = "queue_full"
    """The limit that was reached, as metrics name it. Not on the wire."""


class TooManyConnections(ThawError):
    """This address has as many connections as the gateway allows. Close some, or reuse them."""

    code, status, type = "too_many_connections", 429, "rate_limit_error"


class RateLimitExceeded(ThawError):
    """The API key has used what its limits allow; try again later."""

    code, status, type = "rate_limit_exceeded", 429, "rate_limit_error"
    headers: dict[str, str] | None = None
    """The limits as `x-ratelimit-*`. Not on the wire: only a gateway raises it."""
    limit: str = "requests_per_minute"
    """The limit that was reached, as metrics name it. Not on the wire."""


class InsufficientQuota(ThawError):
    """The API key has used its budget of the day or month; OpenAI's code, which is not retried."""

    code, status, type = "insufficient_quota", 429, "insufficient_quota"


class EngineFailed(ThawError):
    """The engine stopped while it was starting or serving; `thaw logs nodeagent` says why."""

    code = "engine_failed"


class EngineKilled(EngineFailed):
    """Another process killed the engine, or it exited unobserved: its model is not at fault."""

    code = "engine_killed"


class MemoryExceeded(EngineFailed):
    """The model used more memory than its executor's instances have reserved."""

    code = "memory_exceeded"


class DeviceFailed(EngineFailed):
    """The driver of a device failed a call, or hangs. See `nvidia-smi` and the kernel's `dmesg`."""

    code = "device_failed"


class DeviceMissing(ThawError):
    """A requested device does not exist on this node."""

    code = "device_missing"


class CannotSuspend(ThawError):
    """The engine was not suspended and still runs."""

    code = "cannot_suspend"


class RestoreFailed(ThawError):
    """The suspended engine could not be restored to its former state."""

    code = "restore_failed"


class Unavailable(ThawError):
    """A part of the mesh that the request needs is unavailable now."""

    code, status = "unavailable", 503


class Unreachable(Unavailable):
    """No process subscribes to the subject: it is stopped, or restarting."""

    code = "unreachable"


class ReplyLost(Unavailable):
    """The reports on a long request have stopped: its responder has ended, or NATS lost it.

    The request may have been performed.
    """

    code, retry = "reply_lost", True


class InsufficientMemory(Unavailable):
    """The model does not fit any device."""

    code, retry = "insufficient_memory", False


class BodyLost(Unavailable):
    """The gateway that held the request's body does not have it any more; repeat the request."""

    code, retry = "body_lost", True


class StoreFull(Unavailable):
    """The store is full; docs/operations.md has its limit and how to free space."""

    code, retry = "store_full", False


class ShuttingDown(Unavailable):
    """This process is shutting down; another one will answer a retry."""

    code, retry = "shutting_down", True


class DeadlineExceeded(ThawError):
    """No answer arrived within the deadline."""

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
    """Rebuild the exception that `body` was made from.

    An unknown code (of a newer peer) becomes a plain `ThawError`.
    """
    return _BY_CODE.get(body.code, ThawError)._build(body)
