"""Write the grammar of a response with tool calls, from the description of the model's family.

The grammar is in llguidance's dialect of Lark. It has a JSON schema for the arguments of each tool,
or for each argument where the family writes arguments in another notation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from services.engine.domain.argument_grammar import MarkedText, Notation, json_rule, write_any_arguments, write_arguments
from services.engine.domain.output_format import OutputFormat, limit_chars
from services.engine.domain.tool_request import Tool, ToolRequest
from shared.contracts.engines import ToolFormat
from shared.errors import InvalidRequest
from shared.tool_calls.families import FAMILIES
from shared.tool_calls.family import CallObject, Channels, Family, JsonArguments, NamedCall

MAX_CALLS = 16
"""Most calls that a grammar allows in one response."""
_ANY = r"TEXT: /(.|\n)*/"


def tags_of(form: ToolFormat) -> tuple[str, ...]:
    """Return the tags of a family's calls, each of which may be a special token of a vocabulary."""
    return FAMILIES[form].tags


def write_tool_grammar(
    request: ToolRequest, form: ToolFormat, special: dict[str, int], content: OutputFormat | None = None
) -> OutputFormat:
    """Write the grammar of a response.

    Args:
        request: Its `mode` is `auto` or `required`.
        form: The family whose notation of calls the model uses.
        special: Token ids of the tags that are special tokens of the model's vocabulary. The
            grammar demands these tokens, since ordinary tokens of the same text are no tag.
        content: In mode `auto`: the format of a response without calls; None: any text.

    Raises:
        InvalidRequest: The schemas are too large together, `content` cannot be combined, or the
            form cannot enforce a schema.
    """
    family = FAMILIES[form]
    text = MarkedText(special)
    has_channels = isinstance(family.style, Channels)
    rules = _channel_rules(request, text, content) if has_channels else _Framed(family, text, request).rules(content)
    return OutputFormat("grammar", limit_chars("\n".join(["%llguidance {}", *rules]), "tools"), "tools")


@dataclass(frozen=True)
class _Framed:
    """Rules of families that mark calls in the text."""

    family: Family
    text: MarkedText
    request: ToolRequest

    def rules(self, content: OutputFormat | None) -> list[str]:
        """Return the rules from `start`.

        In free text, `opening` begins the calls. `call_rest` is the text after it: all calls of a
        family that writes a list, else one call.
        """
        family, text, request = self.family, self.text, self.request
        begin = family.begin + family.list_begin + family.call_begin
        if family.is_anchored:  # its tags around all calls are optional, and are left out
            opening, rest_begin = "", begin.removeprefix(family.begin)
            end = family.end.removesuffix(family.tags[-1] if family.tags else "")
        else:
            opening, rest_begin = family.opening, begin.removeprefix(family.opening)
            end = family.end
        is_list = bool(family.begin or family.is_anchored)
        rules = [f"body: {' | '.join(f'body_{i}' for i in range(len(request.tools)))}"]
        for i, tool in enumerate(request.tools):
            rules += self._body(i, tool)
        frame = f"body {text.write(family.call_end)}"
        if is_list:
            more = f"({text.write(family.separator + family.call_begin)} {frame})"
            rules.append(f"call_rest: {text.write(rest_begin)} {frame} {self._repeat(more)} {text.write(end)}")
            rules.append(f"calls: {text.write(opening)} call_rest")
        else:
            rules.append(f"call_rest: {text.write(rest_begin)} {frame}")
            rules.append(f"call: {text.write(opening)} call_rest")
            rules.append(f"calls: call {self._repeat(f'({text.write(family.separator)} call)')}")
        if request.mode == "required":
            return ["start: calls", *rules]
        if content is not None:
            return ["start: calls | content", f"content: {_content(content, family)}", *rules]
        return [*self._free_text(opening, is_list=is_list), *rules]

    def _repeat(self, more: str) -> str:
        return f"{more}{{0,{MAX_CALLS - 1}}}" if self.request.parallel else ""

    def _body(self, i: int, tool: Tool) -> list[str]:
        style = self.family.style
        if isinstance(style, CallObject):
            begin = _quote(f'{{"name": "{tool.name}", "{style.arguments}": ')
            return [f'body_{i}: {begin} a{i} "}}"', *_arguments(i, JsonArguments(), tool, self.request, self.text)]
        assert isinstance(style, NamedCall)
        name = self.text.write(f"{style.name_begin}{style.prefix}{tool.name}")
        index = ' ":" INDEX' if style.is_indexed else ""
        rules = ["INDEX: /[0-9]{1,4}/"] if style.is_indexed and i == 0 else []
        return [
            *rules,
            f"body_{i}: {name}{index} {self.text.write(style.name_end)} a{i}",
            *_arguments(i, style.arguments, tool, self.request, self.text),
        ]

    def _free_text(self, opening: str, *, is_list: bool) -> list[str]:
        """Rules of a response in which the model decides whether it calls a tool.

        Without an opening, a response is a call or text by its first character.
        """
        if not opening:
            first = (self.family.list_begin or "{")[0]
            return ['start: calls | PLAIN | ""', rf"PLAIN: /[^\{first} \t\r\n](.|\n)*/"]
        is_special = opening in self.text.special
        head = f"{'head' if is_special else 'head[lazy]'}: TEXT {self.text.write(opening)}"
        repeats = "*" if not is_list and self.request.parallel else "?"
        return [f"start: (head call_rest){repeats} TEXT", head, _ANY]


def _channel_rules(request: ToolRequest, text: MarkedText, content: OutputFormat | None) -> list[str]:
    """Rules of Harmony: reasoning or none, then one call, with which the response ends."""
    next_message = "<|end|><|start|>assistant"
    analysis, rules = text.write_until("ANALYSIS", next_message, [])
    call = "<|channel|>commentary to=functions."
    rules += [
        f"thought: {text.write('<|channel|>analysis<|message|>')} {analysis}",
        f"calls: {' | '.join(f'call_{i}' for i in range(len(request.tools)))}",
    ]
    for i, tool in enumerate(request.tools):
        begin = text.write(f"{call}{tool.name} <|constrain|>json<|message|>")
        rules += [f"call_{i}: {begin} a{i}", *_arguments(i, JsonArguments(), tool, request, text)]
    if request.mode == "required":
        return ["start: thought? calls", *rules]
    final = text.write("<|channel|>final<|message|>")
    body = _content(content, FAMILIES["openai"]) if content is not None else "TEXT"
    return ["start: thought? (calls | final)", f"final: {final} answer", f"answer: {body}", _ANY, *rules]


def _arguments(i: int, notation: Notation, tool: Tool, request: ToolRequest, text: MarkedText) -> list[str]:
    """Write the rules of the arguments of the tool with the number `i`."""
    if request.is_constrained(tool):
        return write_arguments(f"a{i}", notation, tool.schema, text, tool.name)
    return write_any_arguments(f"a{i}", notation, text)


def _content(content: OutputFormat, family: Family) -> str:
    """Write the rule of a response without calls.

    Raises:
        InvalidRequest: The format is no JSON schema, or the family is anchored: its calls begin as
            JSON may, so a lexer cannot separate the two.
    """
    if content.kind != "json_schema" or family.is_anchored:
        raise InvalidRequest(
            f"{content.param} and tools cannot be combined for this model and this format. Omit one of them, or demand a call",
            param=content.param,
        )
    return json_rule(json.loads(content.text), is_compact=content.is_compact)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
