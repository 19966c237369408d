"""The time that a hosted engine works, divided among its requests.

A hosted engine does not report what it computes for whom. The time during which it has requests is
divided equally among those that it has at each moment (processor sharing), so that the sum over
requests is the time that the engine was busy. A request that waits in the engine's own queue gets a
share too.
"""

from __future__ import annotations


class BusyTime:
    """Shares in seconds of a clock that the caller reads. Each change costs O(1)."""

    def __init__(self) -> None:
        self._at = 0.0
        self._total_s = 0.0
        self._share = 0.0
        """Seconds that a request would have got if it had been there from the beginning."""
        self._began: dict[str, float] = {}

    def begin(self, request_id: str, now: float) -> None:
        """The engine has got a request."""
        self._advance(now)
        self._began[request_id] = self._share

    def of_request(self, request_id: str, now: float) -> float:
        """Return the share of a request so far; 0 if the engine does not have it."""
        self._advance(now)
        began = self._began.get(request_id)
        return 0.0 if began is None else self._share - began

    def read_total(self, now: float) -> float:
        """Return the seconds with requests until now."""
        self._advance(now)
        return self._total_s

    def end(self, request_id: str, now: float) -> float:
        """Return the share of a request that the engine no longer has."""
        share = self.of_request(request_id, now)
        self._began.pop(request_id, None)
        return share

    def _advance(self, now: float) -> None:
        if self._began and now > self._at:
            self._share += (now - self._at) / len(self._began)
            self._total_s += now - self._at
        self._at = max(self._at, now)
