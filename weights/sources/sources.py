"""Inspect a model, open it for a load, and find its small files on this host.

The input is `ModelSpec.source`. A load opens the SSD cache if it has the model, otherwise all peers
that have it and the source, which is a reserve unless it is known to be faster. Remote bytes are
verified and cached on the way.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.contracts.model_info import ModelInfo
from shared.contracts.stages import weights_of
from shared.errors import CheckpointInvalid, ThawError, Unavailable
from shared.private import require_private
from weights.cache.caching import CachingTier
from weights.cache.store import EntryRecord, SsdCache
from weights.cache.tier import CachedTier
from weights.formats.checkpoint import Checkpoint, directory_revision
from weights.formats.inspect import check_small_files, describe
from weights.formats.root import check_inside
from weights.sources.failover import FailoverTier, SourcePlace
from weights.sources.listed import ListedTiers
from weights.sources.local_models import OwnDirectories
from weights.sources.open import is_remote, open_source
from weights.sources.peer import PeerTier, same_files
from weights.sources.peers import Peers, peers_first
from weights.tiers.directory import DirectoryTier
from weights.tiers.headers import bring_small_files, every_rank_of
from weights.tiers.http_client import redact_url
from weights.tiers.port import Tier, TierFile

log = logging.getLogger(__name__)
_MOST_PEERS = 4
_PEER_S = 1.0
"""Seconds that a peer has to list the model's files, after the source has listed them."""
_SOURCE_S = 5.0
"""Seconds that the source has to list them, after a peer that has all of them has."""


class Sources:
    """Places to read models from.

    Args:
        small: Directories for small files; the first writable one is used.
        speed_of: `speed_of(link)` returns the link's bandwidth in bytes per second.
    """

    def __init__(
        self,
        cache: SsdCache,
        small: Sequence[Path],
        peers: Peers | None = None,
        speed_of: Callable[[str], float | None] = lambda link: None,
    ) -> None:
        self.cache, self._small, self._peers, self._speed_of = cache, small, peers, speed_of
        self.own, self.listed = OwnDirectories(), ListedTiers()

    # -- inspecting --------------------------------------------------------------------------------

    def inspect(self, source: str, *, trust_remote_code: bool) -> ModelInfo:
        """The properties of a model, from its small files and its weights' headers.

        Raises `InvalidModel` and its kin, or `Unavailable` if the source cannot be reached and the
        cache does not have it.
        """
        tier = self._open_reachable(source)
        try:
            directory = self.small_files(tier, trust_remote_code=trust_remote_code)
            present = _names(tier)
            architecture, _ = check_small_files(directory, present, trust_remote_code=trust_remote_code)
            checkpoint = every_rank_of(tier, directory)
            self._remember(tier)
            return describe(tier.source, tier.revision, architecture, checkpoint, directory, present)
        finally:
            tier.close()

    def _open_reachable(self, source: str) -> Tier:
        try:
            return self._check_listed(open_source(source))
        except Unavailable:
            revision = self.cache.find(source)
            entry = self.cache.acquire(revision) if revision is not None else None
            if entry is None:
                raise
            log.warning(
                "the source cannot be reached; the SSD cache has it",
                extra={"source": redact_url(source), "as": entry.record.source},
            )
            return CachedTier(entry)

    def _check_listed(self, tier: Tier, revision: str | None = None) -> Tier:
        """`tier` if what it is of can be listed, and is of `revision`; closed otherwise."""
        try:
            if tier.directory is None:
                tier.files()
            if revision is not None and tier.revision != revision:
                raise CheckpointInvalid(f"{tier.source} has changed since it was registered; register it again (thaw models add)")
            return tier
        except BaseException:
            tier.close()
            raise

    # -- small files -------------------------------------------------------------------------------

    def small_files(self, tier: Tier, *, trust_remote_code: bool) -> Path:
        """Return the directory with the model's configuration and tokenizer on this host.

        Missing files are fetched. Those of an entry of the SSD cache are copied: the weights may
        stay in memory longer than the entry on the disk.

        Raises:
            Unavailable: No directory is writable. Errors of reading are raised, too.
        """
        if tier.directory is not None and not isinstance(tier, CachedTier):
            return tier.directory
        failure: OSError | None = None
        for root in self._small:
            directory = root / tier.revision
            try:
                directory.mkdir(parents=True, exist_ok=True)
                # Configurations, templates and trusted code are read from here: no other user may
                # write or replace them.
                require_private(directory, 0o755)
                bring_small_files(tier, directory, trust_remote_code=trust_remote_code)
                _point(root / "by-source" / _digest(tier.source), directory)
                return directory
            except OSError as e:
                failure = e
        if tier.directory is not None:
            log.warning(
                "failed to copy the small files of a model from the SSD cache", extra={"source": tier.source, "error": str(failure)}
            )
            return tier.directory
        raise Unavailable(
            f"The small files of {tier.source} cannot be written ({failure}): give the loader a THAW_CACHE_DIR it may write to"
        )

    def small_file(self, source: str, name: str) -> Path | None:
        """Return the path of one of the model's small files; None if it is not here.

        Nothing is fetched for it.

        Args:
            source: The source as resolved.
        """
        if not is_remote(source):
            directory = DirectoryTier.open_source(source).directory
        else:
            directory = next(
                (p for p in (r / "by-source" / _digest(source) for r in self._small) if p.is_dir()), Path("/nonexistent")
            )
            revision = None if directory.is_dir() else self.cache.find(source)
            directory = (self.cache.lookup(revision) if revision else None) or directory
        path = directory / name
        if not path.is_file():
            return None
        check_inside(directory, path)
        return path

    # -- loading -----------------------------------------------------------------------------------

    def open(self, source: str, revision: str, *, pinned: bool = False, follows: bool = True) -> Tier:
        """Open the model for a load from the nearest place.

        Close it after the load's memory is released, or the load is cancelled.

        Args:
            source: The model's source.
            revision: Of its weights.
            pinned: The copy on this machine is not evicted.
            follows: As of `CachingTier`.

        Raises:
            CheckpointInvalid: The place has another revision.
        """
        if not is_remote(source):
            tier = DirectoryTier.open_source(source)
            self.own.record_loaded(revision, tier.directory)
            return tier
        entry = self.cache.acquire(revision, pinned=pinned)
        if entry is not None:
            return CachedTier(entry)
        far = self._open_far(source, revision)
        if far.directory is not None:
            return far
        try:
            return CachingTier(far, self.cache, pinned=pinned, follows=follows, on_wrong=lambda file: self._distrust(far, file))
        except BaseException:
            far.close()
            raise

    def checkpoint(self, tier: Tier, *, trust_remote_code: bool, registered: str | None = None) -> tuple[Path, Checkpoint]:
        """Return the model's directory on this host, and its weights' checked headers.

        The directory has at least the small files.

        Args:
            registered: The revision that the model is loaded as.

        Raises:
            CheckpointInvalid: The directory has changed since it was loaded as that revision.
        """
        directory = self.small_files(tier, trust_remote_code=trust_remote_code)
        checkpoint = every_rank_of(tier, directory)
        if registered is not None and tier.directory is not None and not is_remote(tier.source):
            self.own.check(registered, directory_revision(checkpoint, b""), directory)
        return directory, checkpoint

    def _open_far(self, source: str, revision: str) -> Tier:
        peers, tier = self._open_places(source, revision)
        if tier is None:
            places = [SourcePlace(p, is_peer=True) for p in peers]
        elif tier.directory is not None:
            _close(peers)
            return tier
        else:
            listed = tier.files()
            same = [p for p in peers if same_files(listed, p.files(), is_whole=p.is_whole)]
            _close([p for p in peers if p not in same])
            first = bool(same) and peers_first([self._speed_of(p.link) for p in same], self._speed_of(tier.link))
            own = SourcePlace(tier, is_reserve=first)
            others = [SourcePlace(p, is_peer=True) for p in same]
            places = [*others, own] if first else [own, *others]
        if len(places) == 1:
            return places[0].tier
        return FailoverTier(tier or places[0].tier, places)

    def _open_places(self, source: str, revision: str) -> tuple[list[PeerTier], Tier | None]:
        """Open the peers that have the model, and the source.

        All are asked at once. A peer that answers much later than the source is left out, and so is
        the source if a peer has answered that has all files.

        Returns:
            The peers, and the source; None if it does not answer, but peers do.
        """
        offers = self._peers.offers(revision)[:_MOST_PEERS] if self._peers is not None else []
        asked = [_ask(PeerTier(o.node, o.url, o.token, source, revision, is_whole=o.is_whole)) for o in offers]
        tier, failure = None, None
        try:
            tier = self._open_source_beside(asked, source, revision)
        except Unavailable as e:
            failure = e
        except BaseException:
            for future in asked:
                _close_later(future)
            raise
        wait(asked, None if tier is None and not any(map(_has_all_files, asked)) else _PEER_S)
        peers = [p for f in asked if f.done() and (p := f.result()) is not None]
        for future in asked:
            if not future.done():
                log.info("a peer that offered a model does not answer in time", extra={"source": redact_url(source)})
                _close_later(future)
        if failure is not None and not any(p.is_whole for p in peers):  # the small files are missing
            _close(peers)
            raise failure
        return peers, tier

    def _open_source_beside(self, peers: Sequence[Future[PeerTier | None]], source: str, revision: str) -> Tier:
        """Open the source while peers are asked.

        Raises:
            Unavailable: It cannot be reached, or it does not answer, but a peer that has all files.
        """
        if not peers:
            return self._open_listed(source, revision)
        found: Future[Tier] = Future()

        def work() -> None:
            try:
                found.set_result(self._open_listed(source, revision))
            except BaseException as e:
                found.set_exception(e)

        threading.Thread(target=work, name="list-source", daemon=True).start()
        if _wait_beside(found, peers):
            return found.result()
        log.warning("the source does not answer; reading from peers only", extra={"source": redact_url(source)})
        _close_later(found)
        raise Unavailable(f"{redact_url(source)} does not answer. Check the network and the proxy variables", should_retry=True)

    def _open_listed(self, source: str, revision: str) -> Tier:
        return self.listed.take(revision) or self._check_listed(open_source(source), revision)

    def _distrust(self, tier: Tier, file: TierFile) -> None:
        """Ask the peers that sent bytes of a damaged file no more for a while."""
        if self._peers is not None and isinstance(tier, (FailoverTier, PeerTier)):
            links = tier.list_links(file) if isinstance(tier, FailoverTier) else {tier.link}
            for link in links:
                if link.startswith("peer:"):
                    self._peers.distrust(link.removeprefix("peer:"), tier.revision)

    # -- for peers ---------------------------------------------------------------------------------

    def _remember(self, tier: Tier) -> None:
        """A directory's model can be served to peers by its revision."""
        if tier.directory is not None and not isinstance(tier, CachedTier):
            self.own.remember(tier.revision, tier.directory)

    def is_on_disk(self, weights_id: str) -> bool:
        """True if this host's disk has the weights, or those that they are a part of.

        The question does not count as a use of the copy, which may be evicted at any time.
        """
        revision = weights_of(weights_id)
        return self.cache.lookup(revision) is not None or self.own.find(revision) is not None

    @contextmanager
    def open_complete(self, revision: str) -> Iterator[tuple[Path, EntryRecord] | None]:
        """Protect a model that is complete on this host from eviction within the block.

        Yields:
            Its directory and files; None: this host does not have it.
        """
        entry = self.cache.acquire(revision)
        if entry is not None:
            try:
                yield entry.directory, entry.record
            finally:
                entry.release()
            return
        yield self.own.find(revision)


def _ask(peer: PeerTier) -> Future[PeerTier | None]:
    """Return the peer when it has listed its files; None if it does not have the model.

    The thread is a daemon: a host that hangs does not keep the process.
    """
    found: Future[PeerTier | None] = Future()

    def work() -> None:
        try:
            peer.files()
            found.set_result(peer)
        except ThawError as e:
            log.info("a peer that offered a model does not answer", extra={"peer": peer.node, "error": e.message})
            peer.close()
            found.set_result(None)
        except BaseException as e:
            peer.close()
            found.set_exception(e)

    threading.Thread(target=work, name=f"list-{peer.node}", daemon=True).start()
    return found


def _wait_beside(source: Future[Tier], peers: Sequence[Future[PeerTier | None]]) -> bool:
    """Wait for the source to answer, a bounded time after a peer that has all files.

    Returns:
        False: it has not answered.
    """
    pending = set[Future[Any]](peers)
    while pending and not source.done():
        done, pending = wait({source, *pending}, return_when=FIRST_COMPLETED)
        if any(map(_has_all_files, done - {source})):
            wait([source], _SOURCE_S)
            return source.done()
    wait([source])
    return True


def _has_all_files(asked: Future[Any]) -> bool:
    """True if a peer has answered, and has all files."""
    peer = asked.result() if asked.done() and asked.exception() is None else None
    return isinstance(peer, PeerTier) and peer.is_whole


def _close_later(asked: Future[Any]) -> None:
    """Close the peer or the source when it has answered."""

    def close(future: Future[Any]) -> None:
        if future.exception() is None and (tier := future.result()) is not None:
            tier.close()

    asked.add_done_callback(close)


def _close(tiers: Sequence[Tier]) -> None:
    for tier in tiers:
        tier.close()


def _names(tier: Tier) -> frozenset[str]:
    """Return the names of all files, including files of a directory that no load needs."""
    if tier.directory is not None:
        try:
            return frozenset(p.name for p in tier.directory.iterdir())
        except OSError as e:
            raise CheckpointInvalid(f"{tier.directory} cannot be listed: {e.strerror}; give the loader's user access") from e
    return frozenset(file.name for file in tier.files())


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:32]


def _point(link: Path, directory: Path) -> None:
    """Have `link` lead to `directory`. Several loaders may do so at the same time."""
    link.parent.mkdir(parents=True, exist_ok=True)
    draft = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    draft.symlink_to(directory)
    try:
        draft.replace(link)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
