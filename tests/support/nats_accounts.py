"""Accounts of one NATS server, for tests that need empty streams.

An account shares no subject and no stream with another one. To start a server takes 0.2 CPU seconds
on a busy machine, and hundreds of tests need one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.servers import NatsServer

_ACCOUNTS = 50
"""Most accounts of one server, whose files and streams would otherwise only increase."""


@dataclass(frozen=True)
class NatsAccount:
    """An account that no test has used.

    Attributes:
        url: The server's, with the account's user.
    """

    url: str


class NatsAccounts:
    """Gives each test an account; starts another server when all are used."""

    def __init__(self) -> None:
        self._server: NatsServer | None = None
        self._used = 0

    def take(self) -> NatsAccount:
        if self._server is None or self._used == _ACCOUNTS:
            self.close()
            users = "\n".join(f"t{i} {{ jetstream: enabled, users: [{{ user: t{i}, password: t{i} }}] }}" for i in range(_ACCOUNTS))
            self._server, self._used = NatsServer(config=f"accounts {{ {users} }}"), 0
        user = f"t{self._used}"
        self._used += 1
        return NatsAccount(f"nats://{user}:{user}@127.0.0.1:{self._server.port}")

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None
