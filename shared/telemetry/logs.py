"""Write structured logs: JSON lines with trace and request ids, or plain text.

Logs never contain a prompt.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

from opentelemetry import trace

from shared.settings import CommonSettings

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup_logs(settings: CommonSettings, service: str) -> None:
    """Send this process's logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Json(service) if settings.log_format == "json" else _Text("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for noisy in ("httpx", "httpcore", "urllib3", "faststream", "asyncio", "filelock", "transformers"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


class LogRateLimit:
    """Rate limit of messages about an unreachable dependency: one per kind and minute."""

    def __init__(self, again_s: float = 60.0) -> None:
        self._again_s = again_s
        self._logged_at: dict[str, float] = {}

    def allows(self, kind: str) -> bool:
        now = time.monotonic()
        if now - self._logged_at.get(kind, -self._again_s) < self._again_s:
            return False
        self._logged_at[kind] = now
        return True

    def reset(self, kind: str | None = None) -> None:
        """Reset after a recovery: the next message of the kind, or of any kind, is logged."""
        if kind is None:
            self._logged_at.clear()
        else:
            self._logged_at.pop(kind, None)


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD and not k.startswith("_")}


class _Json(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace_id"] = format(context.trace_id, "032x")
        if (request := request_id.get()) is not None:
            line["request_id"] = request
        line |= _extras(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        extras = " ".join(f"{k}={v}" for k, v in _extras(record).items())
        return f"{super().format(record)} {extras}".rstrip()
