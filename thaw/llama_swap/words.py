"""Command lines as words and options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"-\d+(\.\d+)?")


@dataclass(frozen=True)
class Option:
    """One option of a command line.

    Attributes:
        name: Long name with `_` instead of `-`; a short option that has no known long name keeps
            its dash.
        values: Words that follow it.
    """

    name: str
    values: tuple[str, ...]

    @property
    def value(self) -> str:
        """The only value. Raises ValueError for none or several."""
        if len(self.values) != 1:
            raise ValueError(f"--{self.name.replace('_', '-')} has {len(self.values)} values, not one")
        return self.values[0]


def without_comments(text: str) -> str:
    """Return `text` without lines that begin with #, and with continued lines joined."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return "\n".join(lines).replace("\\\n", " ")


def split(text: str) -> list[str]:
    """Return the words of a command as llama-swap splits them.

    Raises:
        ValueError: A quote is open.
    """
    return shlex.split(without_comments(text).replace("\n", " "))


def is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word)


def options(words: Sequence[str], short: Mapping[str, str]) -> Iterator[Option]:
    """Yield the options of `words`, which begin with one.

    Args:
        words: Words after the program and its positional arguments.
        short: Long names of short options, as `{"-c": "ctx-size"}`.
    """
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        values = [value] if equals else []
        while not equals and at < len(words) and not is_option(words[at]):
            values.append(words[at])
            at += 1
        long = short.get(name, name)
        yield Option(long.removeprefix("--").replace("-", "_") if long[:1] != "-" or long[:2] == "--" else long, tuple(values))


def scalar(text: str) -> int | float | str:
    """Return a number where `text` is the usual way to write it, else `text`."""
    for kind in (int, float):
        try:
            found = kind(text)
        except ValueError:
            continue
        if str(found) == text:
            return found
    return text
