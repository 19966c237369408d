"""The common part of later stages and ranks of a group: the first one has the requests."""

from __future__ import annotations

from shared.contracts.engine import EngineLoad
from shared.contracts.inference import InferRequest
from shared.contracts.migration import RequestsListed, TokensRead
from shared.engines.request_server import RequestServer, Stream
from shared.errors import InstanceDraining, NotFound

NOT_FIRST = "This is a later stage of a group. Its first stage answers requests"


class NoRequests(RequestServer[Stream]):
    """The requests of a later stage: there are none."""

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def _handle_request(self, request: InferRequest, reply: str, parent: str | None, size: int) -> None:
        raise InstanceDraining(NOT_FIRST)


class NoMigration:
    """The part of a later stage in migrations."""

    def list(self) -> RequestsListed:
        return RequestsListed(requests=())

    def read(self, request_id: str) -> TokensRead:
        raise NotFound(NOT_FIRST)

    async def offer_kv(self, read: TokensRead) -> TokensRead:
        """No-op: the first stage offers keys and values."""
        return read

    def yield_(self, request_id: str) -> None:
        raise NotFound(NOT_FIRST)

    def forget(self, name: str) -> None:
        """No-op: nothing is prepared here."""
