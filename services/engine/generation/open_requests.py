"""The requests of a batcher that have not ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class OpenRequests:
    """The progress of each request: its admission, first token and unfinished choices."""

    def __init__(self, ttft_s: float | None) -> None:
        """Begin without requests.

        Args:
            ttft_s: Seconds from the request to its first token that the model's objective allows;
                None: no objective.
        """
        self._ttft_s = ttft_s
        self._due: dict[str, float] = {}
        self._admitted: set[str] = set()
        self._unfinished: Counter[str] = Counter()

    def __contains__(self, request_id: object) -> bool:
        """True if the request generates, and has not ended."""
        return request_id in self._unfinished

    def expect(self, request_id: str, now: float) -> None:
        """Note when the request should have its first token."""
        if self._ttft_s is not None:
            self._due[request_id] = now + self._ttft_s

    def begin(self, request_id: str, choices: int) -> None:
        """The request generates so many choices."""
        self._unfinished[request_id] = choices

    def admit(self, request_id: str) -> bool:
        """Note that a sequence of the request runs; return whether it is the first one."""
        is_first = request_id not in self._admitted
        self._admitted.add(request_id)
        return is_first

    def on_output(self, request_id: str) -> None:
        """The request has a token, vectors or an error: its first token has no deadline now."""
        self._due.pop(request_id, None)

    def finish(self, request_id: str, choices: int) -> bool:
        """Note that so many more choices are complete; return whether all of them are."""
        self._unfinished[request_id] -= choices
        return self._unfinished[request_id] == 0

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._unfinished.pop(request_id, None)
        self._admitted.discard(request_id)
        self._due.pop(request_id, None)

    @property
    def due(self) -> Mapping[str, float]:
        """Return when each request without output should have its first token, by id."""
        return self._due
