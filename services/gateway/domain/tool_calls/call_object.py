"""Incremental reading of one tool call: a JSON object with a name and arguments.

Not a partial JSON parser: the client gets the arguments as the model wrote them, so only the
object around them is read, and the end of the arguments is found by counting brackets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container

from services.gateway.domain.tool_calls.literals import NO_JSON

_WHITE = " \t\r\n"
_ARGUMENTS = frozenset({"arguments", "parameters"})


class ObjectReader:
    """Reads one object character by character, from its `{` to its `}`.

    Attributes:
        name: The tool's name, once it is known.
        has_started: It is a call: name and beginning of the arguments are known.
        is_done: The object is complete.
        is_invalid: The object is no call, or it is malformed.
    """

    def __init__(self, names: Container[str], *, needs_arguments: bool) -> None:
        """Create a reader.

        Args:
            names: The names that are accepted.
            needs_arguments: An object without arguments is no call.
        """
        self._names = names
        self._needs_arguments = needs_arguments
        self._state: Callable[[str], None] = self._open
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._unsent: list[str] = []
        self._has_arguments = False
        self.name: str | None = None
        self.has_started = False
        self.is_done = False
        self.is_invalid = False

    def feed(self, char: str) -> str:
        """Read one character. Returns the arguments that are new, empty until it has started."""
        self._state(char)
        if self.is_invalid or self.name is None or not (self._has_arguments or self.is_done):
            return ""
        self.has_started = True
        new = "".join(self._unsent)
        self._unsent.clear()
        return new

    def _fail(self) -> None:
        self.is_invalid = True

    def _open(self, char: str) -> None:
        if char == "{":
            self._state = self._before_key
        elif char not in _WHITE:
            self._fail()

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._value, self._state = [char], self._in_key
        elif char == "}" and not self._key:
            self._end()
        elif char not in _WHITE:
            self._fail()

    def _in_key(self, char: str) -> None:
        self._value.append(char)
        if self._ends_string(char):
            key = _load("".join(self._value))
            self._key, self._state = key if isinstance(key, str) else "", self._colon

    def _colon(self, char: str) -> None:
        if char == ":":
            self._state = self._before_value
        elif char not in _WHITE:
            self._fail()

    def _before_value(self, char: str) -> None:
        if char in _WHITE:
            return
        self._value = []
        is_duplicate = self._key in _ARGUMENTS and self._has_arguments
        if is_duplicate or (self._key == "name" and (self.name is not None or char != '"')):
            self._fail()
        elif char == "{" and self._key in _ARGUMENTS:
            self._has_arguments = True
            self._depth, self._state = 1, self._in_arguments
            self._unsent.append(char)
        elif char in "{[":
            self._depth, self._state = 1, self._in_nested
        elif char == '"':
            self._value, self._state = [char], self._in_text
        elif char in ",}]:":
            self._fail()
        else:
            self._value, self._state = [char], self._in_scalar

    def _in_arguments(self, char: str) -> None:
        if char in NO_JSON and not self._in_string:  # a bracket is missing before the marker behind the object
            self._fail()
            return
        self._unsent.append(char)
        if self._ends_nested(char):
            self._state = self._after_value

    def _in_nested(self, char: str) -> None:
        if not self._ends_nested(char):
            return
        if self._key in _ARGUMENTS:
            self._fail()
        self._state = self._after_value

    def _in_text(self, char: str) -> None:
        self._value.append(char)
        if not self._ends_string(char):
            return
        text = _load("".join(self._value))
        self._state = self._after_value
        if self._key == "name":
            if not isinstance(text, str) or text not in self._names:
                self._fail()
            else:
                self.name = text
        elif self._key in _ARGUMENTS:  # some models write the arguments as a string of JSON
            if not isinstance(text, str) or not isinstance(_load(text), dict):
                self._fail()
            else:
                self._has_arguments = True
                self._unsent.append(text)

    def _in_scalar(self, char: str) -> None:
        if char not in ",}" and char not in _WHITE:
            self._value.append(char)
            return
        if self._key in _ARGUMENTS:
            if "".join(self._value) != "null":
                self._fail()
                return
            self._has_arguments = True
            self._unsent.append("{}")
        self._state = self._after_value
        self._after_value(char)

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._state = self._before_key
        elif char == "}":
            self._end()
        elif char not in _WHITE:
            self._fail()

    def _end(self) -> None:
        if self.name is None or (self._needs_arguments and not self._has_arguments):
            self._fail()
            return
        if not self._has_arguments:
            self._unsent.append("{}")
        self.is_done = True

    def _ends_string(self, char: str) -> bool:
        """Follow a string of JSON behind its first quote; true at its last."""
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            return True
        return False

    def _ends_nested(self, char: str) -> bool:
        """Follow an object or array behind its first bracket; true at its last."""
        if self._in_string:
            self._in_string = not self._ends_string(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


def _load(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
