"""The usage of a followed response, in case its owner and this gateway end before it is recorded.

A follower gives its client the whole response of another gateway, which records it. Before that it
appends a line to its spool, and a line once the key has ended. The gateway that adopts the spool
finds the responses of which it does not know whether they were recorded, and waits for the ends of
their keys in place of the follower (docs/adr/0106). Gateways of the previous version skip these
lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from services.gateway.domain.open_usage import ended_id
from services.gateway.domain.usage_records import UsageRecord

_FOLLOWED, _KEY, _REPLY, _MESSAGES, _RECORD = "followed", "key", "reply", "messages", "record"


@dataclass(frozen=True, slots=True)
class FollowedResponse:
    """A response of another gateway that was read to its end.

    Attributes:
        key: Name of the Idempotency-Key in the store.
        answer_id: Id of the response.
        reply: Reply subject of its last attempt.
        messages: Messages on `reply`.
        instance_id: The instance that generated it.
    """

    key: str
    answer_id: str
    reply: str
    messages: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class FollowedUsage:
    """The record of a followed response, to be written if its owner is gone.

    Attributes:
        request_id: The follower's request.
        key, reply, messages: As in `FollowedResponse`.
    """

    request_id: str
    key: str
    reply: str
    messages: int
    record: UsageRecord

    def line(self) -> bytes:
        """Encode it as a line of a spool."""
        record = self.record.line().decode().rstrip("\n")
        content = {_FOLLOWED: self.request_id, _KEY: self.key, _REPLY: self.reply, _MESSAGES: self.messages, _RECORD: record}
        return to_json(content) + b"\n"


def find_followed(spools: Iterable[bytes]) -> list[FollowedUsage]:
    """Return the followed responses whose keys had not ended, from whole spools."""
    found: dict[str, FollowedUsage] = {}
    ended: set[str] = set()
    for line in (line for data in spools for line in data.splitlines(keepends=True)):
        if (usage := _parse(line)) is not None:
            found[usage.request_id] = usage
        elif (request_id := ended_id(line)) is not None:
            ended.add(request_id)
    return [usage for request_id, usage in found.items() if request_id not in ended]


def _parse(line: bytes) -> FollowedUsage | None:
    """Return the followed response of a line; None: the line is another, or damaged."""
    if not line.startswith(b'{"followed"') or not line.endswith(b"\n"):
        return None
    try:
        content: dict[str, Any] = from_json(line)
        record = UsageRecord.parse(str(content[_RECORD]).encode() + b"\n")
        names = str(content[_FOLLOWED]), str(content[_KEY]), str(content[_REPLY])
        return FollowedUsage(*names, int(content[_MESSAGES]), record) if record is not None and record.answer_id else None
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
