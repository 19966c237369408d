"""Share model files: the SSD cache on this machine, the peer server in the mesh."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.loader.adapters.peer_server import PeerServer
from services.loader.adapters.resident import ResidentFiles
from services.loader.settings import LoaderSettings
from shared.contracts.loader import CachedModel
from weights.cache.store import SsdCache
from weights.sources.peers import Peers
from weights.sources.sources import Sources

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shared:
    """The part of `LoaderStatus` about caches and peers."""

    cached: tuple[CachedModel, ...] = ()
    ssd_bytes: int = 0
    ssd_budget_bytes: int = 0
    peer_url: str | None = None
    peer_token: str | None = None
    disk_bytes: int = 0
    disk_free_bytes: int = 0


class Sharing:
    """The sources of models, the peers, and the status of this loader's shared files.

    All loaders' statuses update the peers.
    """

    def __init__(self, settings: LoaderSettings) -> None:
        root = (settings.cache_dir or settings.state / "cache").expanduser().resolve()
        self._speed_of: Callable[[str], float | None] = lambda link: None
        self._find_resident: Callable[[str], ResidentFiles | None] = lambda revision: None
        self.peers = Peers(settings.node)
        small = (root / "small", settings.node_state / "loader" / "small")
        self.sources = Sources(SsdCache(root, settings.cache_bytes), small, self.peers, lambda link: self._speed_of(link))
        self._server: PeerServer | None = None
        if settings.peer_host:
            try:
                self._server = PeerServer(
                    settings.peer_host,
                    settings.peer_port,
                    self.sources.open_complete,
                    lambda revision: self._find_resident(revision),
                )
            except OSError as e:
                log.error(
                    "failed to start the peer server; set THAW_PEER_HOST and THAW_PEER_PORT to an address of this host",
                    extra={"host": settings.peer_host, "port": settings.peer_port, "error": str(e)},
                )

    def measure_by(self, speed_of: Callable[[str], float | None]) -> None:
        """Choose between peers and sources by the links' measured bytes per second."""
        self._speed_of = speed_of

    def share_memory(self, find: Callable[[str], ResidentFiles | None]) -> None:
        """Serve the weights in host memory too, which `find` returns by revision."""
        self._find_resident = find

    def status(self) -> Shared:
        """Return what is shared, at most a second old. Reads a directory. Blocks."""
        cache = self.sources.cache.status()
        models = tuple(CachedModel(weights_id=r, tier="ssd", nbytes=n, source=s) for r, s, n in cache.models)
        own = tuple(
            CachedModel(weights_id=r, tier="ssd", nbytes=n, source=s)
            for r, s, n in self.sources.own.sizes()
            if all(m.weights_id != r for m in models)
        )
        server = self._server
        url, token = (server.url, server.token) if server is not None else (None, None)
        return Shared((*models, *own), cache.nbytes, cache.budget, url, token, cache.disk_bytes, cache.disk_free_bytes)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
