"""How a family of models writes tool calls: one description for the parser and the grammar.

A description has the exact text that the family's chat template renders, white space included. The
grammar of the engine writes this text. The parser of the gateway skips white space around the
markers, because models vary it.

    begin list_begin  call_begin CALL call_end  separator  call_begin CALL call_end  end

`CALL` is one of the styles below. The text of a family without `begin` has calls wherever
`call_begin` is, and several calls each have their own frame.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallObject:
    """A JSON object with the name and the arguments: `{"name": …, "arguments": …}`.

    Attributes:
        arguments: Key of the arguments in the grammar. The parser accepts `arguments` and
            `parameters`.
        needs_arguments: An object without arguments is no call.
    """

    arguments: str = "arguments"
    needs_arguments: bool = False


@dataclass(frozen=True)
class JsonArguments:
    """The arguments are a JSON object, as clients get them."""


@dataclass(frozen=True)
class TaggedArguments:
    """Each argument has tags around its key and its value; the value of a string is its text.

    Attributes:
        key_begin, key_end: Around the key.
        value_begin: Between `key_end` and the value.
        value_end: After the value.
        end: After the last argument.
        has_newlines: A line break after the key and one before `value_end` are no part of a value.
        is_end_optional: The beginning of the next argument, and `end`, end a value as well.
    """

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    end: str
    has_newlines: bool = False
    is_end_optional: bool = False


@dataclass(frozen=True)
class PythonArguments:
    """Keyword arguments of Python with literal values: `(place="Bern", days=3)`."""


@dataclass(frozen=True)
class BareArguments:
    """An object with bare keys and strings between `quote`: `{place:<escape>Bern<escape>}`."""

    quote: str


@dataclass(frozen=True)
class NamedCall:
    """The name, then the arguments.

    Attributes:
        arguments: How the arguments are written.
        name_begin: Before the name.
        name_end: Between the name and the arguments.
        prefix: Begins the name, and is no part of it.
        is_indexed: `:` and a number follow the name.
        id_begin: Before an id of the call, which may follow the name; empty: there is none.
    """

    arguments: JsonArguments | TaggedArguments | PythonArguments | BareArguments
    name_begin: str = ""
    name_end: str = ""
    prefix: str = ""
    is_indexed: bool = False
    id_begin: str = ""


@dataclass(frozen=True)
class Channels:
    """Messages with channels (Harmony): a message to a function is a call.

    Its arguments are JSON. Messages of the channel `analysis` are reasoning.
    """


Style = CallObject | NamedCall | Channels


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: As `tool_parser` in thaw.yaml has it.
        models: For people.
        style: How one call is written.
        template_marks: A chat template with all of the texts of one entry is of this family.
        tags: Texts that may be special tokens of the vocabulary.
        begin: Before all calls.
        list_begin: After `begin`, before the first call.
        call_begin, call_end: Around each call.
        separator: Between calls.
        end: After the last call.
        is_anchored: A response may begin with a call without `begin`.
        has_text_arguments: The models' own chat templates take the arguments of earlier calls as
            text, not as objects.
        other_begins: Further beginnings of calls that models write; no grammar has them.
        aliases: Names of vLLM's parsers for this family.
    """

    name: str
    models: str
    style: Style
    template_marks: tuple[tuple[str, ...], ...]
    tags: tuple[str, ...] = ()
    begin: str = ""
    list_begin: str = ""
    call_begin: str = ""
    call_end: str = ""
    separator: str = ""
    end: str = ""
    is_anchored: bool = False
    has_text_arguments: bool = False
    other_begins: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def opening(self) -> str:
        """The first marker of calls; empty: only the beginning of a response has calls."""
        return self.begin.strip() or ("" if self.is_anchored else self.call_begin.strip())
