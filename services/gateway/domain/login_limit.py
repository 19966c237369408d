"""A limit on failed logins at the console, per client and in all."""

from __future__ import annotations

from collections import deque

from services.gateway.domain.client_address import client_of_address

WINDOW_S = 60.0
PER_CLIENT, IN_ALL = 10, 100
"""Failed logins in any `WINDOW_S` seconds. Beyond them correct keys are refused too."""


class LoginLimit:
    """The failed logins of the last minute, at most `IN_ALL`."""

    def __init__(self) -> None:
        self._failures: deque[tuple[float, str]] = deque()

    def wait_s(self, address: str, now: float) -> float:
        """Return the seconds until a client may log in; 0: it may now.

        Args:
            address: Of the client; empty if unknown.
            now: Monotonic seconds.
        """
        while self._failures and now - self._failures[0][0] >= WINDOW_S:
            self._failures.popleft()
        client = client_of_address(address)
        of_client = [at for at, other in self._failures if other == client]
        for failures, limit in (([at for at, _ in self._failures], IN_ALL), (of_client, PER_CLIENT)):
            if len(failures) >= limit:
                return failures[0] + WINDOW_S - now
        return 0.0

    def on_failure(self, address: str, now: float) -> None:
        """A login failed for which `wait_s` returned 0."""
        self._failures.append((now, client_of_address(address)))
