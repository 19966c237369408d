"""The port through which engine output becomes a response."""

from __future__ import annotations

from typing import Any, Protocol

from shared.contracts.inference import Answered, InferStarted


class Diverged(Exception):
    """Regenerated output differs from what the client has already received."""


class TokenSink(Protocol):
    """Build a response from an engine's tokens.

    Attributes:
        pending: Bytes buffered for the client.
        streams: Output is forwarded to the client as it arrives.
        is_repeatable: The sink accepts the same response again from its beginning.
    """

    @property
    def pending(self) -> int: ...
    @property
    def streams(self) -> bool: ...
    @property
    def is_repeatable(self) -> bool: ...
    def reset(self) -> None:
        """Expect the response from its beginning."""

    def on_started(self, message: InferStarted) -> None: ...
    def chunk(self, choices: list[dict[str, Any]]) -> None:
        """Add `ChoiceDelta`s, as decoded from the wire.

        Raises:
            Diverged: The output differs from what the client has already received.
        """

    def on_finished(self, message: Answered) -> None: ...
