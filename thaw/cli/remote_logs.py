"""The logs of nodes behind a gateway, for `thaw logs`.

The mesh runs elsewhere: in containers, under systemd, or on other machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thaw.cli.api import Api
from thaw.errors import CommandError

LEAST_PART = 4
"""Characters of a part of a name that select a log."""


@dataclass
class RemoteLog:
    """A log of a node, and how far it has been read."""

    node: str
    name: str
    position: int | None = None

    def read(self, api: Api, lines: int) -> Iterator[str]:
        """Yield the last lines, or those since the latest read."""
        is_first = self.position is None
        part = api.read_log(self.node, self.name, lines, self.position)
        self.position = part.position
        yield from part.lines
        if is_first and part.rest and len(part.lines) < lines:
            yield part.rest


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
