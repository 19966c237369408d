"""The response that a request's client receives."""

from __future__ import annotations

from services.gateway.requests.passthrough import PassthroughResponse
from services.gateway.requests.sink import TokenSink


class ClientResponse:
    """A response in one of two forms: tokens in `sink`, or HTTP in `passthrough`.

    Attributes:
        passthrough: The engine's HTTP response; None while the response is made of tokens.
        has_started: The client has received some of the response.
        is_replay: The response is read from the capture of an earlier request.
        has_late_error: The request failed after the headers of its response had been sent.
    """

    def __init__(self, sink: TokenSink, buffer_limit_bytes: int) -> None:
        self.sink = sink
        self.passthrough: PassthroughResponse | None = None
        self.has_started = False
        self.is_replay = False
        self.has_late_error = False
        self._buffer_limit_bytes = buffer_limit_bytes

    @property
    def keeps_partial_output(self) -> bool:
        """True if output survives a hand-off; a buffered HTTP body is generated again."""
        return self.passthrough is None or self.passthrough.streams

    @property
    def is_irrevocable(self) -> bool:
        """True if forwarded output rules out starting the response again."""
        if self.passthrough is not None:
            return self.passthrough.streams
        return self.sink.streams and not self.sink.is_repeatable

    def overflows(self, pending_bytes: int) -> bool:
        """True if the client reads too slowly; replays are exempt, as capture is bounded."""
        return pending_bytes > self._buffer_limit_bytes and not self.is_replay

    def restart(self) -> None:
        """Expect a response from its beginning."""
        self.passthrough = None
        self.sink.reset()

    def resume(self) -> None:
        """Expect the rest of the response from another engine."""
        if not self.keeps_partial_output:
            self.passthrough = None
