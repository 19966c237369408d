"""The links of this node, each created with the first load over it."""

from __future__ import annotations

import threading

from shared.contracts.loader import LinkStatus
from weights.transfer.link import Link
from weights.transfer.link_queue import Order


class Links:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._links: dict[str, Link] = {}
        self._lock = threading.Lock()

    def get(self, name: str, threads: int) -> Link:
        with self._lock:
            if name not in self._links:
                self._links[name] = Link(name, threads, self._order)
            return self._links[name]

    def speed_of(self, name: str) -> float | None:
        """Return the measured bandwidth of a link in bytes per second."""
        found = self._links.get(name)
        return found.status().bytes_per_second if found else None

    def statuses(self) -> tuple[LinkStatus, ...]:
        """Return the statuses of the links that have carried bytes.

        A load creates links also for sources that it may not need.
        """
        return tuple(link.status() for link in list(self._links.values()) if link.has_started)

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
