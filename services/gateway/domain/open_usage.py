"""Device time of requests that have not ended, in case their gateway ends before them.

A gateway appends lines about its open requests to its spool, and a line when one has ended. The
gateway that adopts the spool finds the requests that never did, and charges their device time to
their keys: without a request and without tokens, as their clients have received no end
(docs/adr/0097). Gateways of the previous version skip these lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from services.gateway.domain.usage_records import UsageRecord

_OPEN, _ENDED, _LOST, _USAGE = "open", "ended", "lost", "usage"


@dataclass(frozen=True, slots=True)
class OpenUsage:
    """The device time of an open request so far; fields as in `UsageRecord`."""

    request_id: str
    hour: int
    key: str
    model: str
    adapter: str
    compute_us: int
    compute_kind: str

    def line(self) -> bytes:
        """Encode it as a line of a spool, which takes the place of earlier ones of the request."""
        return _encode(_OPEN, self)

    def as_lost(self) -> bytes:
        """Encode it as a line of a request that never ended."""
        return _encode(_LOST, self)


def _encode(kind: str, usage: OpenUsage) -> bytes:
    fields = [usage.hour, usage.key, usage.model, usage.adapter, usage.compute_us, usage.compute_kind]
    return to_json({kind: usage.request_id, _USAGE: fields}) + b"\n"


def ended_line(request_id: str) -> bytes:
    """Encode that a request has ended: its record counts, and no earlier line."""
    return to_json({_ENDED: request_id}) + b"\n"


def ended_id(line: bytes) -> str | None:
    """Return the request that a line says has ended; None: the line is another."""
    found = _parse(line).get(_ENDED)
    return str(found) if found is not None else None


def find_lost(data: bytes) -> list[OpenUsage]:
    """Return the last state of the requests that never ended, from a whole spool."""
    found: dict[str, OpenUsage] = {}
    for line in data.splitlines(keepends=True):
        content = _parse(line)
        if (usage := _read(content, _OPEN)) is not None:
            found[usage.request_id] = usage
        else:
            found.pop(str(content.get(_ENDED, content.get(_LOST, ""))), None)
    return list(found.values())


def parse_lost(line: bytes) -> UsageRecord | None:
    """Return what a request that never ended used: only device time; None: the line is another."""
    usage = _read(_parse(line), _LOST)
    if usage is None:
        return None
    names = usage.hour, usage.key, usage.model, usage.adapter
    found = UsageRecord(*names, False, 0, 0, 0, compute_us=usage.compute_us, compute_kind=usage.compute_kind)
    return found if found.is_storable() else None


def _parse(line: bytes) -> dict[str, Any]:
    """Return the content of a line; empty if it is a record, or damaged."""
    if not line.startswith(b"{") or not line.endswith(b"\n"):
        return {}
    try:
        content = from_json(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _read(content: dict[str, Any], kind: str) -> OpenUsage | None:
    try:
        hour, key, model, adapter, compute_us, compute_kind = content[_USAGE]
        us = max(0, int(compute_us))
        return OpenUsage(str(content[kind]), int(hour), str(key), str(model), str(adapter), us, str(compute_kind))
    except (KeyError, ValueError, TypeError, OverflowError):
        return None
