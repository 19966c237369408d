"""Divide the text of a response into content and calls."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.domain.tool_calls.call_object import ObjectReader
from services.gateway.domain.tool_calls.channels import ChannelParser
from services.gateway.domain.tool_calls.literals import LiteralScanner
from services.gateway.domain.tool_calls.pieces import Piece, Pieces
from services.gateway.domain.tool_calls.readers import WHITE, CallReader, NamedReader, Tools
from shared.contracts.engines import ToolFormat
from shared.tool_calls.families import FAMILIES
from shared.tool_calls.family import CallObject, Channels, Family, NamedCall


class ToolCallParser:
    """Divides the text of one choice into content and calls."""

    def __init__(self, form: ToolFormat, tools: Tools, *, parallel: bool = True) -> None:
        """Create a parser at the beginning of a response.

        Args:
            form: The form in which the model writes calls.
            tools: The request's tools. A call of another name is content.
            parallel: False: calls after the first are dropped.
        """
        family = FAMILIES[form]
        self._out = Pieces(parallel=parallel)
        is_divided = isinstance(family.style, Channels)
        self._parser = ChannelParser(tools, self._out) if is_divided else FramedParser(family, tools, self._out)

    @property
    def calls(self) -> int:
        """Calls that have started."""
        return self._out.calls

    def feed(self, text: str) -> list[Piece]:
        """Return what `text` adds. Text that may begin a call is held back."""
        for char in text:
            self._parser.feed(char)
        return self._out.take()

    def finish(self) -> list[Piece]:
        """Return what was held back at the end of the response."""
        self._parser.finish()
        return self._out.take()


class FramedParser:
    """Reads calls that are marked in the text, or that are all of it.

    Text that turns out to be no call becomes content, as it was written. White space before calls,
    and within their frames, is dropped.
    """

    def __init__(self, family: Family, tools: Tools, out: Pieces) -> None:
        self._family = family
        self._tools = tools
        self._out = out
        self._openings = LiteralScanner([family.opening, *family.other_begins])
        name_begin = family.style.name_begin if isinstance(family.style, NamedCall) else ""
        self._each = [text.strip() for text in (family.call_begin, name_begin) if text.strip()]
        """Markers before each call."""
        self._closing = _closing_markers(family)
        self._next = family.separator.strip() or (self._each[0] if self._each else "")
        self._after = LiteralScanner(
            [*self._closing, self._next, *([family.begin.strip()] if not family.separator.strip() else [])]
        )
        self._state: Callable[[str], None] = self._at_start if family.is_anchored else self._in_text
        self._white = ""
        self._held: list[str] = []
        """Text that may be a call, until that is known."""
        self._is_optional = False
        """True: the held text follows a call, and is no content if the response ends there."""
        self._steps: list[str] = []
        """Markers that are expected before the call."""
        self._marker = ""
        self._reader: CallReader | None = None

    def feed(self, char: str) -> None:
        self._state(char)

    def finish(self) -> None:
        if self._state == self._after_call:
            self._after.take()
        elif self._state == self._in_text or self._state == self._at_start:
            pending = self._openings.take()
            if pending or not self._out.calls:
                self._out.add_text(self._white + pending)
        elif self._reader is None and self._is_optional:
            pass
        elif self._reader is None or not self._reader.has_started:
            self._out.add_text(self._white + "".join(self._held))
        self._white, self._held, self._reader = "", [], None

    # Content.

    def _at_start(self, char: str) -> None:
        """A response of some families is all calls if it begins as one does."""
        if char in WHITE:
            self._white += char
            return
        first = (self._family.list_begin or "{")[0]
        if char == first:
            self._expect([self._family.list_begin.strip(), *self._each])
            self._before_call(char)
        else:
            self._state = self._in_text
            self._in_text(char)

    def _in_text(self, char: str) -> None:
        """Pass text on. White space, and the beginning of a marker, wait for what follows them."""
        text, found = self._openings.feed(char)
        for each in text:
            if each in WHITE:
                self._white += each
            else:
                self._out.add_text(self._white + each)
                self._white = ""
        if found:
            self._open(found)

    def _open(self, marker: str) -> None:
        """Expect what follows an opening marker."""
        family = self._family
        steps = [family.begin.strip(), family.list_begin.strip(), *self._each]
        if marker in steps:
            steps = steps[steps.index(marker) + 1 :]
        elif family.begin:  # another text of `begin`
            steps = steps[1:]
        self._expect(steps, marker)

    # Calls.

    def _expect(self, steps: list[str], held: str = "", *, is_optional: bool = False) -> None:
        self._steps = [step for step in steps if step]
        self._held = [held] if held else []
        self._is_optional = is_optional
        self._marker = ""
        self._reader = None
        self._state = self._before_call

    def _before_call(self, char: str) -> None:
        if not self._steps and char not in WHITE:
            self._reader = self._new_reader()
            self._state = self._in_call
            self._in_call(char)
            return
        if char in WHITE and not self._marker:
            self._held.append(char)
            return
        self._marker += char
        if not self._steps[0].startswith(self._marker):
            self._give_up(char)
            return
        self._held.append(char)
        if self._marker == self._steps[0]:
            self._steps.pop(0)
            self._marker = ""

    def _new_reader(self) -> CallReader:
        style = self._family.style
        if isinstance(style, CallObject):
            return ObjectReader(self._tools, needs_arguments=style.needs_arguments)
        assert isinstance(style, NamedCall)
        return NamedReader(style, self._tools)

    def _give_up(self, char: str) -> None:
        """Output the held text as content. `char` may begin a call."""
        self._out.add_text(self._white + "".join(self._held))
        self._white, self._held, self._reader = "", [], None
        self._state = self._in_text
        self._in_text(char)

    def _in_call(self, char: str) -> None:
        reader = self._reader
        assert reader is not None
        had_started = reader.has_started
        arguments = reader.feed(char)
        if reader.is_invalid and not reader.has_started:
            self._give_up(char)
            return
        if not had_started:
            if not reader.has_started:
                self._held.append(char)
                return
            self._white, self._held = "", []
            self._out.start_call(reader.name or "")
        self._out.add_arguments(arguments)
        if reader.is_done or reader.is_invalid:
            self._reader = None
            self._state = self._after_call
            if not reader.is_done and any(marker.startswith(char) for marker in self._closing):
                self._after_call(char)  # the frame ends malformed arguments

    def _after_call(self, char: str) -> None:
        """Expect the end of a call's frame, or the next call; other text is content again."""
        if char in WHITE and not self._after.pending:
            self._white += char
            return
        text, found = self._after.feed(char)
        if found in self._closing:
            self._white = ""
        if text:
            self._resume_text(text + self._after.take())
        elif found and found == self._next:
            steps = self._each[1:] if self._each and found == self._each[0] else self._each
            self._expect(steps, found, is_optional=bool(self._family.separator.strip()))
        elif found and found == self._family.begin.strip():
            self._open(found)
        elif found and found == self._closing[-1]:
            self._state = self._in_text

    def _resume_text(self, text: str) -> None:
        if self._family.begin and not self._next:
            self._expect([])  # calls in lines, without a marker before each
        elif self._family.is_anchored and not self._family.list_begin and text.startswith("{"):
            self._expect([])  # calls in lines, without the separator
        else:
            self._state = self._in_text
        for each in text:
            self._state(each)


def _closing_markers(family: Family) -> list[str]:
    """Return the markers after a call and after all calls, in their order."""
    found = []
    for text in (family.call_end, family.end):
        for tag in family.tags:
            text = text.replace(tag, f"\0{tag}\0")
        found += [part.strip() for part in text.split("\0") if part.strip()]
    return found
