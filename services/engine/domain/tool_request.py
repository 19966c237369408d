"""Read the tools of a chat: `tools` and `tool_choice` of OpenAI's chat completions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.engine.domain.output_format import check_schema_size
from shared.errors import InvalidRequest, UnsupportedParameter

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}\Z")
Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        schema: JSON schema of its arguments.
    """

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
        """True if a grammar constrains the calls: required calls, and tools with `strict`."""
        return self.mode == "required" or (self.mode == "auto" and any(tool.is_strict for tool in self.tools))

    def is_constrained(self, tool: Tool) -> bool:
        """True if a grammar constrains the calls of a tool to its schema.

        Beside strict tools the model decides about the arguments of the others.
        """
        return self.mode == "required" or tool.is_strict or not any(each.is_strict for each in self.tools)


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
