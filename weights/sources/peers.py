"""Track the loaders of other nodes that have a model, by their statuses.

The module also decides whether to read from a peer or from the source first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.contracts.loader import LoaderStatus

_STATUS_TIMEOUT_S = 5.0
"""Seconds without a status after which a loader counts as gone; it publishes one every second."""
_DISTRUSTED_FOR_S = 600.0


@dataclass(frozen=True)
class Offer:
    """A model at another node.

    Attributes:
        busy: Bytes that the node's own links have queued.
        is_whole: It has all files on its disk; otherwise only the weight files, in host memory.
    """

    node: str
    url: str
    token: str
    busy: int = 0
    is_whole: bool = True


class Peers:
    """Statuses of all loaders but this one's.

    Args:
        node: This node.
        clock: Monotonic seconds.
    """

    def __init__(self, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._node, self._clock = node, clock
        self._lock = threading.Lock()
        self._statuses: dict[str, tuple[float, LoaderStatus]] = {}
        self._distrusted: dict[tuple[str, str], float] = {}

    async def on_status(self, status: LoaderStatus) -> None:
        """A status of any loader of the mesh."""
        if status.node != self._node:
            with self._lock:
                self._statuses[status.node] = (self._clock(), status)

    def offers(self, revision: str) -> list[Offer]:
        """Return the peers that have `revision`: on disk first, then in memory only.

        The least busy are first among each.
        """
        now = self._clock()
        with self._lock:
            self._statuses = {n: (at, s) for n, (at, s) in self._statuses.items() if now - at < _STATUS_TIMEOUT_S}
            self._distrusted = {k: at for k, at in self._distrusted.items() if now - at < _DISTRUSTED_FOR_S}
            found = [
                Offer(s.node, s.peer_url, s.peer_token, sum(link.queued_bytes for link in s.links), _is_on_disk(s, revision))
                for _, s in self._statuses.values()
                if s.peer_url and s.peer_token and (s.node, revision) not in self._distrusted
                if _is_on_disk(s, revision) or _is_in_memory(s, revision)
            ]
        return sorted(found, key=lambda o: (not o.is_whole, o.busy, o.node))

    def distrust(self, node: str, revision: str) -> None:
        """Ignore `node` for `revision` for a while: its bytes were wrong."""
        with self._lock:
            self._distrusted[node, revision] = self._clock()


def _is_on_disk(status: LoaderStatus, revision: str) -> bool:
    return any(c.weights_id == revision and c.tier == "ssd" for c in status.cached)


def _is_in_memory(status: LoaderStatus, revision: str) -> bool:
    held = (s for s in status.segments if s.weights_id == revision and s.loaded_bytes == s.total_bytes and not s.is_partial)
    return any(c.weights_id == revision for c in status.cached) or any(s.error is None for s in held)


def peers_first(peers: Sequence[float | None], source: float | None) -> bool:
    """True if a peer is read before the source.

    Speeds in bytes per second, None: not measured yet.

    1. The source is known to be faster than every peer, all of them measured: no.
    2. Otherwise yes: a peer is on the mesh's own network, costs the source nothing, and its speed
       will be known afterwards.
    """
    return not (source is not None and all(p is not None and p < source for p in peers))
