"""Readers of one tool call, and of its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from services.gateway.domain.tool_calls.argument_types import literal_to_json, quote_part, text_to_json
from services.gateway.domain.tool_calls.literals import NO_JSON, LiteralScanner
from shared.tool_calls.argument_types import is_text, types_of
from shared.tool_calls.family import BareArguments, JsonArguments, NamedCall, PythonArguments, TaggedArguments

WHITE = " \t\r\n"
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:-")
_IDENTIFIER = _NAME - frozenset(".:-")
_MAX_NAME = 160
Tools = Mapping[str, Mapping[str, Any]]
"""The schemas of the tools' arguments, by the tools' names."""


class ArgumentsReader(Protocol):
    """Reads the arguments of a call, and the marker after them if the style has one.

    Attributes:
        has_started: The beginning of the arguments is known.
        is_done: They are complete.
        is_invalid: They are malformed.
    """

    has_started: bool
    is_done: bool
    is_invalid: bool

    def feed(self, char: str) -> str:
        """Read one character. Returns the JSON that is new, empty until it has started."""
        ...


class CallReader(ArgumentsReader, Protocol):
    """Reads one call. `name` is known when it has started."""

    name: str | None


class NamedReader:
    """Reads a name and the arguments behind it."""

    def __init__(self, style: NamedCall, tools: Tools) -> None:
        self._style = style
        self._tools = tools
        self._state: Callable[[str], str] = self._in_name
        self._written = ""
        ends = [style.name_end.strip(), style.id_begin]
        self._ends = LiteralScanner(ends)
        self._is_end_found = not ends[0]
        self._arguments: ArgumentsReader | None = None
        self.name: str | None = None
        self.has_started = False
        self.is_done = False
        self.is_invalid = False

    def feed(self, char: str) -> str:
        return self._state(char)

    def _in_name(self, char: str) -> str:
        if char in WHITE and not self._written:
            return ""
        if char in _NAME and len(self._written) < _MAX_NAME:
            self._written += char
            return ""
        self.name = self._find_name()
        if self.name is None:
            self.is_invalid = True
            return ""
        self._arguments = _arguments_reader(self._style, self._tools[self.name])
        self._state = self._after_name
        return self._after_name(char)

    def _find_name(self) -> str | None:
        names = [self._written]
        if self._style.is_indexed:
            names.append(self._written.rpartition(":")[0])
        names += [name.removeprefix(self._style.prefix) for name in names]
        if self._style.is_indexed:
            names.append(names[1].rpartition(".")[2])  # in another namespace than `prefix`
            if self._written.isdigit() and len(self._tools) == 1:  # models omit the name if there is no choice
                names += self._tools
        return next((name for name in names if name in self._tools), None)

    def _after_name(self, char: str) -> str:
        """Expect the marker before the arguments; a JSON object needs none."""
        begins = self._is_end_found or (char == "{" and isinstance(self._style.arguments, JsonArguments))
        if not self._ends.pending and (char in WHITE or begins):
            if char not in WHITE:
                self._state = self._in_arguments
                return self._in_arguments(char)
            return ""
        text, found = self._ends.feed(char)
        if found and found == self._style.id_begin:
            self._state = self._in_id
        elif found:
            self._is_end_found = True
        elif text:
            self.is_invalid = True
        return ""

    def _in_id(self, char: str) -> str:
        if char in _NAME:
            return ""
        self._state = self._after_name
        return self._after_name(char)

    def _in_arguments(self, char: str) -> str:
        reader = self._arguments
        assert reader is not None
        new = reader.feed(char)
        self.has_started, self.is_done, self.is_invalid = reader.has_started, reader.is_done, reader.is_invalid
        return new


def _arguments_reader(style: NamedCall, schema: Mapping[str, Any]) -> ArgumentsReader:
    match style.arguments:
        case JsonArguments():
            return JsonReader()
        case TaggedArguments() as tags:
            return TaggedReader(tags, schema)
        case PythonArguments():
            return PythonReader()
        case BareArguments(quote=quote):
            return BareReader(quote, schema)


class JsonReader:
    """Passes a JSON object on as the model wrote it. Its end is found by counting brackets.

    Where a bracket is missing, the marker behind the object ends it.
    """

    def __init__(self) -> None:
        self._brackets = Brackets('"')
        self.has_started = False
        self.is_done = False
        self.is_invalid = False

    def feed(self, char: str) -> str:
        if not self.has_started and char != "{":
            self.is_invalid = char not in WHITE
            return ""
        self.has_started = True
        if char in NO_JSON and not self._brackets.is_open:
            self.is_invalid = True
            return ""
        self._brackets.feed(char)
        self.is_done = self._brackets.depth == 0
        return char


class Brackets:
    """Counts open brackets outside of strings.

    Attributes:
        depth: Open brackets.
        is_open: A string is open.
    """

    def __init__(self, quotes: str) -> None:
        self._quotes = quotes
        self._quote = ""
        self._is_escaped = False
        self.depth = 0

    @property
    def is_open(self) -> bool:
        return bool(self._quote)

    def feed(self, char: str) -> None:
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in self._quotes:
            self._quote = char
        elif char in "{[(":
            self.depth += 1
        elif char in "}])":
            self.depth -= 1


class TaggedReader:
    """Reads arguments between tags.

    A string is passed on while it grows, other values when they are complete.
    """

    def __init__(self, style: TaggedArguments, schema: Mapping[str, Any]) -> None:
        self._style = style
        self._schema = schema
        self._begin, self._end = style.key_begin, style.end
        self._value_end = style.value_end.strip()
        self._between = LiteralScanner((self._begin, self._end))
        self._key_end = LiteralScanner((style.key_end.strip(),))
        self._value_begin = LiteralScanner((style.value_begin,))
        ends = [self._value_end, *((self._begin, self._end) if style.is_end_optional else ())]
        self._value = LiteralScanner([*ends, *(["\n" + end for end in ends] if style.has_newlines else [])])
        self._state: Callable[[str], str] = self._between_arguments
        self._key = ""
        self._types = frozenset[str]()
        self._text: list[str] = []
        self._is_first = True
        self._is_value_empty = True
        self.has_started = False
        self.is_done = False
        self.is_invalid = False

    def feed(self, char: str) -> str:
        return self._state(char)

    def _between_arguments(self, char: str) -> str:
        text, found = self._between.feed(char)
        if found:
            return self._on_marker(found)
        # Models that err here mostly continue correctly, so what is between arguments is skipped.
        self.is_invalid = not self.has_started and bool(text.strip())
        return ""

    def _on_marker(self, found: str) -> str:
        begun, self.has_started = self.has_started, True
        if found == self._end:
            self.is_done = True
            return "}" if begun else "{}"
        self._key, self._state = "", self._in_key
        return "" if begun else "{"

    def _in_key(self, char: str) -> str:
        text, found = self._key_end.feed(char)
        self._key += text
        if len(self._key) > _MAX_NAME:
            self.is_invalid = True
        if not found:
            return ""
        self._key = self._key.strip()
        self._types = types_of(self._schema, self._key)
        self._text, self._is_value_empty = [], True
        self._state = self._before_value if self._style.value_begin else self._in_value
        comma, self._is_first = "" if self._is_first else ", ", False
        return f"{comma}{json.dumps(self._key, ensure_ascii=False)}: " + ('"' if is_text(self._types) else "")

    def _before_value(self, char: str) -> str:
        text, found = self._value_begin.feed(char)
        self.is_invalid = bool(text.strip())
        if found:
            self._state = self._in_value
        return ""

    def _in_value(self, char: str) -> str:
        if self._is_value_empty and self._style.has_newlines and char == "\n" and not self._value.pending:
            self._is_value_empty = False
            return ""
        text, found = self._value.feed(char)
        if text or found:
            self._is_value_empty = False
        out = self._add(text)
        if not found:
            return out
        if not is_text(self._types):
            out += text_to_json("".join(self._text), self._types)
        else:
            out += '"'
        self._state = self._between_arguments
        marker = found.strip()
        return out if marker == self._value_end else out + self._on_marker(marker)

    def _add(self, text: str) -> str:
        if is_text(self._types):
            return quote_part(text)
        self._text.append(text)
        return ""


class PythonReader:
    """Reads keyword arguments of Python behind their parenthesis, each when it is complete."""

    def __init__(self) -> None:
        self._state: Callable[[str], str] = self._before_key
        self._key = ""
        self._value: list[str] = []
        self._brackets = Brackets("\"'")
        self.has_started = False
        self.is_done = False
        self.is_invalid = False

    def feed(self, char: str) -> str:
        return self._state(char)

    def _before_key(self, char: str) -> str:
        if char in WHITE:
            if self._key:
                self._state = self._before_equals
        elif char == "=" and self._key:
            return self._before_equals(char)
        elif char == ")" and not self._key:
            return self._finish()
        elif char in _IDENTIFIER and len(self._key) < _MAX_NAME:
            self._key += char
        else:
            self.is_invalid = True
        return ""

    def _before_equals(self, char: str) -> str:
        if char != "=":
            self.is_invalid = char not in WHITE
            return ""
        begun, self.has_started = self.has_started, True
        self._value, self._state = [], self._in_value
        return f"{', ' if begun else '{'}{json.dumps(self._key)}: "

    def _in_value(self, char: str) -> str:
        if self._brackets.depth == 0 and char in ",)" and not self._brackets.is_open:
            try:
                value = literal_to_json("".join(self._value).strip())
            except ValueError:
                self.is_invalid = True
                return ""
            self._key, self._state = "", self._before_key
            return value + (self._finish() if char == ")" else "")
        self._brackets.feed(char)
        self._value.append(char)
        return ""

    def _finish(self) -> str:
        begun, self.has_started, self.is_done = self.has_started, True, True
        return "}" if begun else "{}"


class BareReader:
    """Reads an object with bare keys and strings between a quote of its own, from its `{` on."""

    def __init__(self, quote: str, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._quote = LiteralScanner((quote,))
        self._in_quote = False
        self._open: list[str] = []
        self._word = ""
        self._is_key = True
        self._needs_comma = False
        self._types = frozenset[str]()
        self._is_string_held = False
        self.has_started = False
        self.is_done = False
        self.is_invalid = False

    def feed(self, char: str) -> str:
        if not self._open:
            if char != "{":
                self.is_invalid = char not in WHITE
                return ""
            self.has_started = True
            self._open.append(char)
            return char
        text, found = self._quote.feed(char)
        out = self._add_string(text) if self._in_quote else "".join(map(self._structure, text))
        if not found:
            return out
        self._in_quote = not self._in_quote
        return out + (self._begin_string() if self._in_quote else self._end_string())

    @property
    def _in_object(self) -> bool:
        return self._open[-1] == "{"

    def _separate(self) -> str:
        """Return the comma before a key or an element."""
        needed, self._needs_comma = self._needs_comma and (self._is_key or not self._in_object), True
        return ", " if needed else ""

    def _begin_string(self) -> str:
        if self._in_object and self._is_key:
            self._is_string_held = True
            return ""
        # The schema decides about an argument that is no string and is quoted nevertheless.
        self._is_string_held = len(self._open) == 1 and "string" not in self._types
        return self._separate() + ("" if self._is_string_held else '"')

    def _add_string(self, text: str) -> str:
        if self._is_string_held:
            self._word += text
            return ""
        return quote_part(text)

    def _end_string(self) -> str:
        if self._in_object and self._is_key:
            return ""  # its colon follows
        value, self._word = self._word, ""
        self._is_key = True
        return text_to_json(value, self._types) if self._is_string_held else '"'

    def _structure(self, char: str) -> str:
        if self.is_done or self.is_invalid:
            return ""
        if char == ":" and self._in_object and self._is_key:
            key, self._word = self._word.strip(), ""
            comma = self._separate()
            self._is_key = False
            if len(self._open) == 1:
                self._types = types_of(self._schema, key)
            return f"{comma}{json.dumps(key, ensure_ascii=False)}: "
        if char in "{[":
            out = self._separate()
            self._open.append(char)
            self._is_key, self._needs_comma = True, False
            return out + char
        if char in "}],":
            out = self._end_word()
            if char == ",":
                self._is_key = True
                return out
            if {"}": "{", "]": "["}[char] != self._open.pop():
                self.is_invalid = True
                return ""
            self._is_key = self._needs_comma = True
            self.is_done = not self._open
            return out + char
        self._word += char
        return ""

    def _end_word(self) -> str:
        word, self._word = self._word.strip(), ""
        if not word:
            return '""' if self._in_object and not self._is_key else ""  # a key without a value
        if self._in_object and self._is_key:
            self.is_invalid = True  # a key without a value
            return ""
        out = self._separate()
        try:
            return out + literal_to_json(word)
        except ValueError:
            return out + json.dumps(word, ensure_ascii=False)
