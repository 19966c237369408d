"""An answer that an engine gives in HTTP's own form: status, content type and bytes, which the client gets as they are."""

from __future__ import annotations

from shared.contracts.inference import InferResponse

_RETRIED = (408, 409, 429)


class Relay:
    """Holds what has come and not been written yet. `events` counts those of a stream that were whole."""

    def __init__(self, head: InferResponse) -> None:
        self.head = head
        self.kind = head.content_type.split(";", 1)[0].strip().lower()
        self.events = 0
        self._body = bytearray()
        self._tail = b"\n\n"

    @property
    def streams(self) -> bool:
        """Whether its bytes are passed on as they come. JSON and errors are kept until they are whole, so that an engine that breaks
        meanwhile leaves an error with a status of its own."""
        return self.head.status < 400 and self.kind != "application/json" and not self.kind.endswith("+json")

    @property
    def is_events(self) -> bool:
        return self.kind == "text/event-stream"

    @property
    def kept(self) -> bool:
        """Whether a repetition may be answered with it: not if it asks to be tried again."""
        return self.head.status < 500 and self.head.status not in _RETRIED

    def takes(self, head: InferResponse) -> bool:
        """Whether the rest of this answer may come under such a head."""
        return head.status == self.head.status and head.content_type == self.head.content_type

    @property
    def size(self) -> int:
        return len(self._body)

    @property
    def between_events(self) -> bool:
        """Whether something of ours may follow what has been taken."""
        return self._tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))

    def add(self, data: bytes) -> None:
        self._body += data

    def take(self) -> bytes:
        """Everything since the last call."""
        data = bytes(self._body)
        self._body.clear()
        if data:
            seen = self._tail + data
            self.events += _ends(seen) - _ends(self._tail)
            self._tail = seen[-4:]
        return data


def _ends(data: bytes) -> int:
    return data.count(b"\n\n") + data.count(b"\r\n\r\n")
