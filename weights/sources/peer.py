"""Read another node's complete models, by revision, as a tier.

services/loader/adapters/peer_server.py serves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from pydantic import ValidationError

from shared.errors import CheckpointInvalid
from weights.cache.store import EntryRecord
from weights.formats.checkpoint import MAX_JSON_BYTES
from weights.tiers.connection import Patience
from weights.tiers.http_client import HttpClient
from weights.tiers.names import is_safe
from weights.tiers.port import TierFile
from weights.tiers.ranges import RangeReader, RemoteFile
from weights.tiers.remote import RemoteTier
from weights.tiers.retry import Backoff

_PATIENCE = Patience(connect_s=2.0, stall_s=5.0)
_BACKOFF = Backoff(attempts=2, first_s=0.1)
"""A peer that does not answer at once is given up: the source has the same bytes."""


class PeerTier(RemoteTier):
    """A model's files at another node's loader.

    Attributes:
        source: Source of the model.
        revision: Revision of the model.
        is_whole: The peer has all files; otherwise the weight files only.
    """

    def __init__(self, node: str, url: str, token: str, source: str, revision: str, *, is_whole: bool = True) -> None:
        self.is_whole, self.node, self._url, self._revision = is_whole, node, url.rstrip("/"), revision
        # The mesh's own network is no proxy's business, and neither is the token.
        client = HttpClient({"Authorization": f"Bearer {token}"}, _PATIENCE, direct=True)
        super().__init__(source, f"peer:{node}", client, RangeReader(client, _BACKOFF))

    @property
    def revision(self) -> str:
        return self._revision

    def _list(self) -> list[tuple[TierFile, RemoteFile]]:
        listing = RemoteFile(lambda: f"{self._url}/models/{self._revision}", f"the listing of {self.source} at peer {self.node}")
        data = self._reader.head(listing, MAX_JSON_BYTES)
        try:
            record = EntryRecord.model_validate_json(data or b"")
        except ValidationError as e:
            raise CheckpointInvalid(f"Peer {self.node} has no {self.source} (any more)") from e
        files = [TierFile(f.name, f.size, f.version, f.sha256, f.md5) for f in record.files if is_safe(f.name)]
        return [(f, self._remote(f)) for f in files]

    def _remote(self, file: TierFile) -> RemoteFile:
        url = f"{self._url}/models/{self._revision}/{quote(file.name)}"
        return RemoteFile(lambda: url, f"{self.source}/{file.name} at peer {self.node}", file.size)


def same_files(listed: Sequence[TierFile], other: Sequence[TierFile], *, is_whole: bool) -> bool:
    """True if another place lists the same files of the same sizes.

    Args:
        is_whole: It has to list all of them; otherwise some.
    """
    files, found = {(f.name, f.size) for f in listed}, {(f.name, f.size) for f in other}
    return files == found if is_whole else bool(found) and found <= files
