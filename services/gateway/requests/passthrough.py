"""An HTTP response of an engine that the client receives unchanged."""

from __future__ import annotations

from shared.contracts.inference import InferResponse

_RETRIED = (408, 409, 429)


class PassthroughResponse:
    """Status, content type and unwritten bytes of an engine's HTTP response.

    Attributes:
        media_type: The content type without its parameters, in lower case.
        events: Complete server-sent events taken so far.
    """

    def __init__(self, head: InferResponse) -> None:
        self.head = head
        self.media_type = head.content_type.split(";", 1)[0].strip().lower()
        self.events = 0
        self._body = bytearray()
        self._tail = b"\n\n"

    @property
    def streams(self) -> bool:
        """True if bytes are forwarded as they arrive.

        JSON and errors are buffered until they are complete, so that an engine that fails
        midway still yields an error with its own status.
        """
        if self.head.status >= 400:
            return False
        return self.media_type != "application/json" and not self.media_type.endswith("+json")

    @property
    def is_event_stream(self) -> bool:
        return self.media_type == "text/event-stream"

    @property
    def is_cacheable(self) -> bool:
        """True if a repetition gets this response, rather than a retry."""
        return self.head.status < 500 and self.head.status not in _RETRIED

    def matches(self, head: InferResponse) -> bool:
        """True if the rest of this response may arrive under another engine's `head`."""
        return head.status == self.head.status and head.content_type == self.head.content_type

    @property
    def size(self) -> int:
        """Bytes that have not been taken."""
        return len(self._body)

    @property
    def is_between_events(self) -> bool:
        """True if an event or comment of the gateway may follow the bytes taken so far."""
        return self._tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))

    def add(self, data: bytes) -> None:
        self._body += data

    def take(self) -> bytes:
        """Return the bytes added since the last call."""
        data = bytes(self._body)
        self._body.clear()
        if data:
            seen = self._tail + data
            self.events += _count_ends(seen) - _count_ends(self._tail)
            self._tail = seen[-4:]
        return data


def _count_ends(data: bytes) -> int:
    return data.count(b"\n\n") + data.count(b"\r\n\r\n")
