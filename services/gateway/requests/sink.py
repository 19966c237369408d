"""What an exchange knows of those beside it: who makes an answer of its engine's tokens, and its Idempotency-Key."""

from __future__ import annotations

from typing import Any, Protocol

from shared.contracts.inference import Answered, InferStarted


class Diverged(Exception):
    """An answer that is generated again is not the one that its client has got a part of."""


class Sink(Protocol):
    """Makes an answer of an engine's tokens. `pending` is how many bytes it holds for a client that has not read them. `streams`: what it
    has taken is on its way to the client. `repeatable`: it can take the same answer again from its beginning."""

    @property
    def pending(self) -> int: ...
    @property
    def streams(self) -> bool: ...
    @property
    def repeatable(self) -> bool: ...
    def reset(self) -> None:
        """The answer begins again."""

    def started(self, message: InferStarted) -> None: ...
    def chunk(self, choices: list[dict[str, Any]]) -> None:
        """Raises `Diverged`."""

    def finished(self, message: Answered) -> None: ...


class Key(Protocol):
    """The request's Idempotency-Key, as its exchange knows it."""

    async def client_left(self) -> None: ...
    async def settled(self) -> None: ...
