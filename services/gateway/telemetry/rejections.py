"""Why a gateway rejected a request, as its metric `thaw.requests.rejected` names it.

| reason | the request was rejected because |
| --- | --- |
| `requests_per_minute`, `tokens_per_minute`, `concurrent_requests` | its key reached this limit |
| `budget` | its key has used its budget, or active requests may use the rest |
| `queue_full` | its model has as many waiting requests as it may have |
| `queue_timeout` | its model was not ready in time |
| `open_bytes` | active requests have as many bytes as the gateway, the key or the model may have |
| `active_batches` | its key has as many batches as it may have |
| `console_pages` | as many pages of the console are open as may be |
| `logins` | too many logins at the console have failed |
| `invalid_key` | it has no valid key |
| `permission` | its key has another scope, or the route refuses its Host or Origin |
"""

from __future__ import annotations

from shared.errors import (
    AuthenticationFailed,
    InsufficientQuota,
    PermissionDenied,
    QueueFull,
    QueueTimeout,
    RateLimitExceeded,
    ThawError,
)

_REASONS: tuple[tuple[type[ThawError], str], ...] = (
    (InsufficientQuota, "budget"),
    (QueueTimeout, "queue_timeout"),
    (AuthenticationFailed, "invalid_key"),
    (PermissionDenied, "permission"),
)


def rejection_reason(error: ThawError) -> str | None:
    """Return why a request was rejected; None: it failed for another reason."""
    if isinstance(error, QueueFull | RateLimitExceeded):
        return error.limit
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), None)
