"""Tool calls in the text of a response: a parser for each form in which models write them.

The parsers are state machines over characters. Their state depends on the text so far and on
nothing else: any division of a text into parts gives the same deltas when they are joined. So a
response that another engine continues, or that is replayed, has the same calls.

Forms: `hermes` (Hermes, Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`), `mistral`
(`[TOOL_CALLS][{"name": …, "arguments": …}]`), `llama3` (the response is `{"name": …, "parameters":
…}`; several calls are separated by semicolons).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.domain.call_reader import CallReader
from shared.contracts.engines import ToolFormat

_OPENINGS: dict[ToolFormat, str] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": ""}
_CLOSING = "</tool_call>"
_WHITE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Text:
    """Content outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The first delta of a call."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A fragment of a call's arguments, as the model wrote them."""

    call: int
    text: str


Piece = Text | CallStarted | Arguments


def call_id(response_id: str, choice: int, call: int) -> str:
    """Return the id of a call. A replayed response has the same ids."""
    return "call_" + hashlib.blake2s(f"{response_id} {choice} {call}".encode(), digest_size=12).hexdigest()


class ToolCallParser:
    """Divides the text of one choice into content and calls."""

    def __init__(self, form: ToolFormat, names: frozenset[str], *, parallel: bool = True) -> None:
        """Create a parser at the beginning of a response.

        Args:
            form: The form in which the model writes calls.
            names: The names of the request's tools. A call of another name is content.
            parallel: False: calls after the first are dropped.
        """
        self._form: ToolFormat = form
        self._names = names
        self._parallel = parallel
        self._opening = _OPENINGS[form]
        self._state: Callable[[str], None] = self._in_first_object if form == "llama3" else self._in_text
        self._white = ""
        self._marker = ""
        self._reader: CallReader | None = None
        self._has_list_begun = False
        self._out: list[Piece] = []
        self.calls = 0
        """Calls that have started."""

    def feed(self, text: str) -> list[Piece]:
        """Return what `text` adds. Text that may begin a call is held back."""
        for char in text:
            self._state(char)
        return self._take()

    def finish(self) -> list[Piece]:
        """Return what was held back at the end of the response."""
        if self._reader is not None and not self._reader.has_started:
            self._add_text(self._white + self._opening + "".join(self._reader.raw))
        elif self._reader is None and self._state == self._before_call:
            if not (self._has_list_begun and self.calls):
                self._add_text(self._white + self._opening + self._marker)
        elif self._reader is None and self._state != self._after_call and (self._marker or not self.calls):
            self._add_text(self._white + self._marker)
        self._white = self._marker = ""
        self._reader = None
        return self._take()

    def _take(self) -> list[Piece]:
        out, self._out = self._out, []
        return out

    # Content.

    def _in_text(self, char: str) -> None:
        """Pass text on. White space, and the beginning of a marker, wait for what follows them."""
        if self._opening.startswith(self._marker + char):
            self._marker += char
            if self._marker == self._opening:
                self._marker = ""
                self._has_list_begun = False
                self._state = self._before_call
        elif self._marker:
            self._release()
            self._in_text(char)
        elif char in _WHITE:
            self._white += char
        else:
            self._add_text(self._white + char)
            self._white = ""

    def _release(self) -> None:
        self._add_text(self._white + self._marker)
        self._white = self._marker = ""

    # Calls.

    def _in_first_object(self, char: str) -> None:
        """Llama 3: the response, or what follows a semicolon, is a call if it is an object."""
        if char in _WHITE:
            self._white += char
        elif char == "{":
            self._begin(char)
        else:
            self._add_text(self._white + self._marker + char)
            self._white = self._marker = ""
            self._state = self._add_text

    def _before_call(self, char: str) -> None:
        """Expect an object after the opening marker, or the next entry of Mistral's list."""
        is_list = self._form == "mistral"
        if char in _WHITE:
            self._marker += char
        elif is_list and char == "[" and not self._has_list_begun:
            self._has_list_begun = True
            self._marker += char
        elif is_list and self._has_list_begun and char == "]":
            self._marker, self._state = "", self._in_text
        elif char == "{":
            self._begin(char)
        else:
            self._add_text(self._white + self._opening + self._marker)
            self._white = self._marker = ""
            self._state = self._in_text
            self._in_text(char)

    def _begin(self, char: str) -> None:
        self._reader = CallReader(self._names, needs_arguments=self._form == "llama3")
        self._reader.raw = list(self._marker)
        self._marker = ""
        self._state = self._in_call
        self._in_call(char)

    def _in_call(self, char: str) -> None:
        reader = self._reader
        assert reader is not None
        had_started = reader.has_started
        arguments = reader.feed(char)
        if reader.has_started and not had_started:
            self._white = ""
            self._add_piece(CallStarted(self.calls, reader.name or ""))
            self.calls += 1
        if arguments:
            self._add_piece(Arguments(self.calls - 1, arguments))
        if reader.is_invalid and not reader.has_started:
            self._add_text(self._white + self._opening + "".join(reader.raw))
            self._white = ""
            self._reader = None
            self._state = self._add_text if self._form == "llama3" else self._in_text
        elif reader.is_done or reader.is_invalid:
            self._reader = None
            self._state = self._after_call

    def _after_call(self, char: str) -> None:
        """Expect the end of a call's frame; what is not part of it is content again."""
        if self._form == "hermes":
            if _CLOSING.startswith(self._marker + char):
                self._marker += char
                if self._marker == _CLOSING:
                    self._marker, self._state = "", self._in_text
            elif self._marker or char not in _WHITE:
                text, self._marker, self._state = self._marker + char, "", self._in_text
                for each in text:
                    self._in_text(each)
        elif char in _WHITE:
            return
        elif self._form == "mistral":
            if char in ",]" and self._has_list_begun:
                self._state = self._before_call if char == "," else self._in_text
            else:
                self._state = self._in_text
                self._in_text(char)
        elif char == ";":
            self._state = self._in_first_object
        else:
            self._add_text(char)
            self._state = self._add_text

    # Output: neighbours of one kind are joined.

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if self._out and isinstance(last := self._out[-1], Text):
            self._out[-1] = Text(last.text + text)
        else:
            self._out.append(Text(text))

    def _add_piece(self, piece: CallStarted | Arguments) -> None:
        if piece.call and not self._parallel:
            return
        last = self._out[-1] if self._out else None
        if isinstance(piece, Arguments) and isinstance(last, Arguments) and last.call == piece.call:
            self._out[-1] = Arguments(piece.call, last.text + piece.text)
        else:
            self._out.append(piece)
