"""Messages with channels, as gpt-oss writes them (Harmony).

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{…}<|call|>

Source: https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re
from collections.abc import Callable

from services.gateway.domain.tool_calls.literals import LiteralScanner
from services.gateway.domain.tool_calls.pieces import Pieces
from services.gateway.domain.tool_calls.readers import WHITE, JsonReader, Tools

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CALL = "<|call|>"
_ENDS = ("<|end|>", _CALL, "<|return|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_MAX_HEADER = 1000


class ChannelParser:
    """Divides a response into reasoning, content and calls.

    The prompt ends with the beginning of a message, so a response begins with its channel. A
    message to anything but a tool of the request is content, as it was written. A response without
    channels is content.
    """

    def __init__(self, tools: Tools, out: Pieces) -> None:
        self._tools = tools
        self._out = out
        self._state: Callable[[str], None] = self._read_between
        self._begins = LiteralScanner((_START, _CHANNEL))
        self._header_end = LiteralScanner((_MESSAGE,))
        self._ends = LiteralScanner((*_ENDS, _START))
        self._header = ""
        self._white = ""
        self._held = ""
        self._reader: JsonReader | None = None
        self._add: Callable[[str], None] = out.add_text

    def feed(self, char: str) -> None:
        self._state(char)

    def finish(self) -> None:
        if self._state == self._read_between:
            self._add_plain(self._begins.take())
        elif self._state == self._in_header:
            pass  # a frame without a message
        elif self._reader is not None and not self._reader.has_started:
            self._out.add_text(self._held + self._ends.take())
        elif self._reader is None:
            self._add(self._ends.take())

    def _read_between(self, char: str) -> None:
        text, found = self._begins.feed(char)
        self._add_plain(text)
        if found:
            self._header, self._white, self._state = found, "", self._in_header

    def _add_plain(self, text: str) -> None:
        for char in text:
            if char in WHITE:
                self._white += char
            else:
                self._out.add_text(self._white + char)
                self._white = ""

    def _in_header(self, char: str) -> None:
        text, found = self._header_end.feed(char)
        self._header += text
        if len(self._header) > _MAX_HEADER:
            self._out.add_text(self._header + self._header_end.take())
            self._state = self._read_between
        elif found:
            self._open_message()

    def _open_message(self) -> None:
        channel = self._header.rpartition(_CHANNEL)[2].split(maxsplit=1)
        found = _RECIPIENT.search(self._header)
        self._state, self._reader, self._held = self._in_message, None, ""
        self._add = self._out.add_reasoning if channel and channel[0] == "analysis" else self._out.add_text
        if found is None:
            return
        self._add = self._out.add_text
        self._held = self._header + _MESSAGE
        name = found[1].removeprefix("functions.")
        if name in self._tools:
            self._name, self._reader = name, JsonReader()
        else:
            self._out.add_text(self._held)

    def _in_message(self, char: str) -> None:
        text, found = self._ends.feed(char)
        for each in text:
            self._add_argument(each) if self._reader is not None else self._add(each)
        if not found:
            return
        if self._reader is not None and not self._reader.has_started:
            if found == _CALL:  # a call without arguments
                self._out.start_call(self._name)
                self._out.add_arguments("{}")
            else:
                self._out.add_text(self._held)
        self._reader = None
        if found == _START:
            self._header, self._state = found, self._in_header
        else:
            self._white, self._state = "", self._read_between

    def _add_argument(self, char: str) -> None:
        reader = self._reader
        assert reader is not None
        if reader.is_done or (reader.is_invalid and reader.has_started):
            return
        had_started = reader.has_started
        new = reader.feed(char)
        if reader.is_invalid:
            if not had_started:
                self._out.add_text(self._held + char)
                self._reader = None
        elif not reader.has_started:
            self._held += char
        else:
            if not had_started:
                self._out.start_call(self._name)
            self._out.add_arguments(new)
