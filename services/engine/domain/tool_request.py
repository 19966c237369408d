"""Read the tools of a chat, and write the grammar of the calls that it demands.

`tool_choice` and `tools` are those of OpenAI's chat completions. A grammar is written in
llguidance's dialect of Lark, with a JSON schema for the arguments of each tool.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.engine.domain.output_format import OutputFormat, check_schema_size, limit_chars
from shared.contracts.engines import ToolFormat
from shared.errors import InvalidRequest, UnsupportedParameter

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}\Z")
MAX_CALLS = 16
"""Most calls of one response that a grammar allows."""
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,12}"
"""White space between tokens of arguments. Bounded, as in other JSON (docs/adr/0073)."""
_ANY = r"TEXT: /(.|\n)*/"

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `schema`: of its arguments."""

    name: str
    schema: dict[str, Any]
    is_strict: bool = False


@dataclass(frozen=True)
class ToolRequest:
    """The tools of a request.

    Attributes:
        tools: Those that the response may call.
        mode: `none`: no calls; `auto`: the model decides; `required`: at least one call.
        is_named: The request names the only tool that may be called.
        parallel: Several calls are allowed.
    """

    tools: tuple[Tool, ...]
    mode: Mode
    is_named: bool = False
    parallel: bool = True

    @property
    def is_enforced(self) -> bool:
        """True if a grammar holds the calls: demanded calls, and tools with `strict`."""
        return self.mode == "required" or (self.mode == "auto" and any(tool.is_strict for tool in self.tools))


def may_be_enforced(tools: Any, choice: Any) -> bool:
    """True if the tools of a body may need a grammar. Cheap, and without checks."""
    if not isinstance(tools, list) or not tools or choice == "none":
        return False
    if choice not in (None, "auto"):
        return True
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    return any(isinstance(function, dict) and function.get("strict") is True for function in functions)


def read_tools(tools: Sequence[dict[str, Any]] | None, choice: Any, parallel: Any) -> ToolRequest | None:
    """Return the tools of a request; None: it has none.

    Raises:
        InvalidRequest: A tool or the choice is malformed, or the choice names no tool.
        UnsupportedParameter: A tool is not a function.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice demands a call, and the request has no tools. Send tools", param="tool_choice")
        return None
    found = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool.name for tool in found]
    if len(set(names)) < len(names):
        raise InvalidRequest("Two tools have the same name. Rename one of them", param="tools")
    many = parallel is not False
    if choice is None or choice in ("auto", "none", "required"):
        return ToolRequest(tuple(found), choice or "auto", parallel=many)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict):
        raise InvalidRequest("tool_choice must be none, auto, required, or a function with its name", param="tool_choice")
    named = [tool for tool in found if tool.name == function.get("name")]
    if not named:
        raise InvalidRequest("tool_choice names a function that is not in tools. Add it to tools", param="tool_choice")
    return ToolRequest(tuple(named), "required", is_named=True, parallel=False)


def _tool(tool: dict[str, Any], where: str) -> Tool:
    if tool.get("type", "function") != "function":
        raise UnsupportedParameter(
            f"{where} is of the type {str(tool.get('type'))[:40]!r}, which is not supported. Use functions", param="tools"
        )
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.match(name):
        raise InvalidRequest(f"{where}.function.name must have 1 to 128 of the characters a-z, A-Z, 0-9 and _.:-", param="tools")
    schema = function.get("parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where}.function.parameters must be a JSON schema", param="tools")
    check_schema_size(schema, "tools")
    return Tool(name, schema, function.get("strict") is True)


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the form in which a chat template writes calls; None if it is not known."""
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template:
        # Others of this tag write XML or pairs of keys and values in it.
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if '"parameters":' in template and ("<|python_tag|>" in template or "ipython" in template):
        return "llama3"
    return None


def tags_of(form: ToolFormat) -> tuple[str, ...]:
    """Tags that frame calls, which may be special tokens."""
    return {"hermes": ("<tool_call>", "</tool_call>"), "mistral": ("[TOOL_CALLS]",), "llama3": ()}[form]


def shorten_call_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Give calls ids of nine letters and digits, which Mistral's templates require."""
    short = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        short["tool_call_id"] = _short_id(message["tool_call_id"])
    if isinstance(calls := message.get("tool_calls"), list):
        has_id = [isinstance(call, dict) and isinstance(call.get("id"), str) for call in calls]
        short["tool_calls"] = [call | {"id": _short_id(call["id"])} if ok else call for call, ok in zip(calls, has_id, strict=True)]
    return short


def _short_id(call: str) -> str:
    return call if _SHORT_ID.match(call) else hashlib.blake2s(call.encode(errors="replace")).hexdigest()[:9]


def write_tool_grammar(
    request: ToolRequest, form: ToolFormat, special: dict[str, int], content: OutputFormat | None = None
) -> OutputFormat:
    """Write the grammar of a response.

    Args:
        request: Its `mode` is `auto` or `required`.
        form: The form of calls.
        special: Ids of those tags that are special tokens, which no text consists of.
        content: In mode `auto`: the format of a response without calls.

    Raises:
        InvalidRequest: The schemas are too large together, or `content` cannot be combined.
    """
    count = f"{{0,{MAX_CALLS - 1}}}" if request.parallel else "{0}"
    rules = [f"body: {' | '.join(f'body_{i}' for i in range(len(request.tools)))}"]
    key = "parameters" if form == "llama3" else "arguments"
    for i, tool in enumerate(request.tools):
        begin = _quote(f'{{"name": "{tool.name}", "{key}": ')
        rules += [f'body_{i}: {begin} arguments_{i} "}}"', f"arguments_{i}: {_json(tool.schema)}"]
    opening = tags_of(form)
    tags = [f"<[{special[tag]}]>" if tag in special else _quote(tag) for tag in opening]
    match form:
        case "hermes":
            rules.append(f'call_rest: "\\n" body "\\n" {tags[1]}')
            rules.append(f"call: {tags[0]} call_rest")
            calls = "calls: call" + (f' ("\\n" call){count}' if request.parallel else "")
        case "mistral":
            rules.append('call_rest: "[" body' + (f' (", " body){count}' if request.parallel else "") + ' "]"')
            calls = f"calls: {tags[0]} call_rest"
        case "llama3":
            calls = "calls: body" + (f' ("; " body){count}' if request.parallel else "")
    if request.mode == "required":
        rules = ["start: calls", calls, *rules]
    elif content is not None:
        rules = ["start: calls | content", calls, f"content: {_content(content, form)}", *rules]
    else:
        rules = [*_free_text(form, tags, opening, special, calls, request), *rules]
    text = limit_chars("\n".join(["%llguidance {}", *rules]), "tools")
    return OutputFormat("grammar", text, "tools")


def _free_text(
    form: ToolFormat, tags: Sequence[str], opening: Sequence[str], special: dict[str, int], calls: str, request: ToolRequest
) -> list[str]:
    """Rules of a response in which the model decides whether it calls."""
    if form == "llama3":
        return ['start: calls | PLAIN | ""', calls, r"PLAIN: /[^{ \t\r\n](.|\n)*/"]
    head = f"head: TEXT {tags[0]}" if opening[0] in special else f"head[lazy]: TEXT {tags[0]}"
    repeats = "*" if form == "hermes" and request.parallel else "?"
    return [f"start: (head call_rest){repeats} TEXT", head, _ANY]


def _content(content: OutputFormat, form: ToolFormat) -> str:
    """Write a response without calls.

    Llama 3's calls begin as JSON does, so a lexer cannot separate the two.
    """
    if content.kind != "json_schema" or form == "llama3":
        raise InvalidRequest(
            f"{content.param} and tools cannot be combined for this model and this format. Omit one of them, or demand a call",
            param=content.param,
        )
    return _json(json.loads(content.text), is_compact=content.is_compact)


def _json(schema: dict[str, Any], *, is_compact: bool = False) -> str:
    options: dict[str, Any] = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": _WHITE_SPACE}
    return "%json " + json.dumps({"x-guidance": options} | schema)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
