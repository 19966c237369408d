"""The output of a parser of tool calls: the pieces of a response's text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Content outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model marks as its reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The first delta of a call."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A fragment of a call's arguments, in JSON."""

    call: int
    text: str


Piece = Text | Reasoning | CallStarted | Arguments


def call_id(response_id: str, choice: int, call: int) -> str:
    """Return the id of a call. A replayed response has the same ids."""
    return "call_" + hashlib.blake2s(f"{response_id} {choice} {call}".encode(), digest_size=12).hexdigest()


class Pieces:
    """The output of a parser: neighbours of one kind are joined.

    Args:
        parallel: False: calls after the first are dropped.
    """

    def __init__(self, *, parallel: bool) -> None:
        self._parallel = parallel
        self._out: list[Piece] = []
        self.calls = 0
        """Calls that have started."""

    def take(self) -> list[Piece]:
        """Return the pieces since the last time."""
        out, self._out = self._out, []
        return out

    def add_text(self, text: str) -> None:
        if not text:
            return
        if self._out and isinstance(last := self._out[-1], Text):
            self._out[-1] = Text(last.text + text)
        else:
            self._out.append(Text(text))

    def add_reasoning(self, text: str) -> None:
        if not text:
            return
        if self._out and isinstance(last := self._out[-1], Reasoning):
            self._out[-1] = Reasoning(last.text + text)
        else:
            self._out.append(Reasoning(text))

    def start_call(self, name: str) -> None:
        self.calls += 1
        if self.calls == 1 or self._parallel:
            self._out.append(CallStarted(self.calls - 1, name))

    def add_arguments(self, text: str) -> None:
        """Add arguments of the last call."""
        call = self.calls - 1
        if not text or (call and not self._parallel):
            return
        if self._out and isinstance(last := self._out[-1], Arguments) and last.call == call:
            self._out[-1] = Arguments(call, last.text + text)
        else:
            self._out.append(Arguments(call, text))
