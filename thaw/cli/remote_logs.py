"""The logs of nodes behind a gateway, for `thaw logs`.

The mesh runs elsewhere: in containers, under systemd, or on other machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from thaw.cli.api import Api
from thaw.errors import CommandError

LEAST_PART = 4
"""Characters of a part of a name that select a log."""
MOST_FAILURES = 10
"""Reads of a log that is followed that may fail in a row."""
_FIRST_RETRY_S = 1.0
_MOST_RETRY_S = 8.0
_FINAL = frozenset({"certificate", "invalid_api_key", "not_found", "permission_denied"})
"""Codes of errors that do not pass by themselves."""


@dataclass
class RemoteLog:
    """A log of a node, and how far it has been read."""

    node: str
    name: str
    position: int | None = None
    failures: int = 0
    """Failed reads in a row."""
    _retry_at: float = float("-inf")

    def read(self, api: Api, lines: int) -> Iterator[str]:
        """Yield the last lines, or those since the latest read."""
        is_first = self.position is None
        part = api.read_log(self.node, self.name, lines, self.position)
        self.position = part.position
        yield from part.lines
        if is_first and part.rest and len(part.lines) < lines:
            yield part.rest

    def follow(self, api: Api, lines: int, report: Callable[[str], None]) -> list[str]:
        """Return the lines since the latest read; none before the retry of a failed one is due.

        Args:
            api: Of the gateway.
            lines: Number of lines at most.
            report: Called with the description of a failure after which the read is tried again.

        Raises:
            CommandError: The gateway refuses, or `MOST_FAILURES` reads in a row failed.
        """
        if time.monotonic() < self._retry_at:
            return []
        try:
            found = list(self.read(api, lines))
        except CommandError as e:
            self.failures += 1
            if e.code in _FINAL or self.failures >= MOST_FAILURES:
                raise
            retry_s = min(_MOST_RETRY_S, _FIRST_RETRY_S * 2 ** (self.failures - 1))
            self._retry_at = time.monotonic() + retry_s
            report(f"{self.node}: {e.what.rstrip('.')}. Trying again in {retry_s:.0f} s.")
            return []
        self.failures = 0
        return found


def find_remote(api: Api, service: str) -> dict[str, RemoteLog]:
    """Return the logs of nodes that a name selects.

    Raises:
        CommandError: No node has such a log, or the gateway refuses to serve logs.
    """
    known: dict[str, RemoteLog] = {}
    silent: list[str] = []
    for node in api.cluster().nodes:
        try:
            listed = api.node_logs(node.node).logs if node.alive else None
        except CommandError as e:
            if e.code != "unreachable":
                raise
            listed = None
        if listed is None:
            silent.append(node.node)
            continue
        for log in listed:
            title = log.name if node.node in log.name else f"{log.name}.{node.node}"
            known[title] = RemoteLog(node.node, log.name)
    found = {title: log for title, log in known.items() if title == service or title.startswith(f"{service}.")}
    if not found and len(service) >= LEAST_PART:
        found = {title: log for title, log in known.items() if service in title}
    if found:
        return found
    missing = f" These nodes do not answer: {', '.join(silent)}." if silent else ""
    raise CommandError(
        f"No node behind {api.url} has a log of {service!r}.{missing}",
        f"Logs: {', '.join(sorted(known)) or 'none'}. Those of gateways and schedulers stay on their machines.",
        code="not_found",
    )
