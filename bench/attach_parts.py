"""The parts of an attach: when each message between the processes passed NATS.

A second connection receives every message of the mesh, so that all times are of one clock. It costs
CPU time: the parts explain the figures of `bench.attach`, and do not replace them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from bench.report import median
from shared.contracts import subjects
from shared.messaging.mesh import flush

FIRST, LAST = "start command", "first token"


@dataclass(frozen=True)
class _Passed:
    name: str
    at: float


class Tap:
    """Records the messages of one instance's start, from its command to its first token."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._instance_id = ""
        self._replies: dict[str, str] = {}
        self._passed: list[_Passed] = []
        self._runs: list[list[_Passed]] = []

    async def listen(self, client: Client) -> None:
        """Receive every message of the mesh."""
        await client.subscribe(">", cb=self._on_message)
        await flush(client)

    def end(self, *, is_kept: bool) -> None:
        """End the record of a start, and keep it for `print` if it has a first token."""
        if is_kept and any(p.name == LAST for p in self._passed):
            self._runs.append(self._passed)
        self._passed, self._replies, self._instance_id = [], {}, ""

    async def _on_message(self, message: Msg) -> None:
        at = time.perf_counter()
        name = self._name(message)
        if name is None or any(p.name == LAST for p in self._passed):
            return
        count = sum(p.name == name or p.name.startswith(f"{name} #") for p in self._passed)
        name = f"{name} #{count + 1}" if count else name
        self._passed.append(_Passed(name, at))
        if message.reply and not message.reply.startswith("t.replies"):
            self._replies[message.reply] = f"{name}: answer"

    def _name(self, message: Msg) -> str | None:
        subject = message.subject
        if subject in self._replies:
            return self._replies.pop(subject)
        if subject == subjects.node_command(self._node):
            body = _parse(message)
            if body.get("kind") != "start":
                return None
            self._passed, self._replies, self._instance_id = [], {}, str(body["instance_id"])
            return FIRST
        if not self._instance_id:
            return None
        if subject.startswith("t.replies."):
            return LAST if _parse(message).get("kind") == "chunk" else "request admitted"
        if self._instance_id.encode() not in message.data and subject != subjects.infer(self._instance_id):
            return None
        return self._name_of_instance(subject, message)

    def _name_of_instance(self, subject: str, message: Msg) -> str | None:
        if subject == subjects.infer(self._instance_id):
            return "request"
        body = _parse(message)
        if subject.startswith(f"{subjects.PREFIX}.executor."):
            return f"executor: {body.get('kind')}"
        if subject == subjects.loader_command(self._node):
            return f"loader: {body.get('kind')} {body.get('until') or ''}".rstrip()
        if subject == subjects.engine_report(self._node):
            return f"report: {body.get('state')} {body.get('phase') or ''}".rstrip()
        if subject in (subjects.node_status(self._node), subjects.node_changes(self._node)):
            instances: list[dict[str, Any]] = body.get("instances", [])
            found = next((i for i in instances if i.get("instance_id") == self._instance_id), {})
            return f"status: {found.get('state')}{' accepts' if found.get('accepts_requests') else ''}"
        return None

    def print(self) -> None:
        """Print the median time of each message since the command, and since the message before."""
        names = [n for n in _names(self._runs) if sum(any(p.name == n for p in run) for run in self._runs) * 2 > len(self._runs)]
        found = sorted((median([_since_command(run, name) for run in self._runs if _has(run, name)]), name) for name in names)
        before = 0.0
        print(f"{'message':44} {'at ms':>8} {'after ms':>8}   ({len(self._runs)} starts)")
        for at, name in found:
            print(f"{name:44} {at:8.1f} {at - before:8.1f}")
            before = at


def _names(runs: Sequence[Sequence[_Passed]]) -> list[str]:
    return list(dict.fromkeys(p.name for run in runs for p in run))


def _has(run: Sequence[_Passed], name: str) -> bool:
    return any(p.name == name for p in run)


def _since_command(run: Sequence[_Passed], name: str) -> float:
    """Return the milliseconds between the start command and a message."""
    at = next(p.at for p in run if p.name == name)
    return (at - run[0].at) * 1e3


def _parse(message: Msg) -> dict[str, Any]:
    try:
        found = json.loads(message.data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
