"""Requests of Anthropic's Messages API as chat completions.

Fields and content blocks as in the reference of `POST /v1/messages`. Fields outside the schema are
added to the chat completion.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.http.translation.chat_translator import ClientRequest, contents_of, image_url_of, require_text
from shared.contracts.openai import Objects
from shared.errors import InvalidRequest, UnsupportedParameter

Block = dict[str, Any]
Message = dict[str, Any]
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessageParam(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    role: Literal["user", "assistant", "system"]
    content: str | Objects


class MessagesRequest(BaseModel):
    """The body of `POST /v1/messages`."""

    model_config = ConfigDict(extra="allow", frozen=True)
    model: str
    messages: Annotated[list[MessageParam], Field(fail_fast=True)] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: str | Objects | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    service_tier: str | None = None
    mcp_servers: Objects | None = None
    container: str | dict[str, Any] | None = None


class CountTokensRequest(MessagesRequest):
    """The body of `POST /v1/messages/count_tokens`: a message request that generates nothing."""

    max_tokens: int = Field(default=1, ge=1)


def to_chat(request: MessagesRequest) -> tuple[bytes, ClientRequest]:
    """Translate a request.

    Returns:
        The body of the chat completion, and what its response is translated by.

    Raises:
        InvalidRequest: A block or a field is malformed.
        UnsupportedParameter: A field or a block would change the output, and has no equivalent.
    """
    _check_supported(request)
    messages: list[Message] = []
    if request.system:
        messages.append({"role": "system", "content": _system(request.system)})
    for i, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{i}].content")
    body: dict[str, Any] = {"messages": messages}
    body |= {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.stop_sequences:
        body["stop"] = request.stop_sequences
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    if isinstance(user := (request.metadata or {}).get("user_id"), str):
        body["user"] = user
    if request.tools:
        body["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        body |= _tool_choice(request.tool_choice)
    body |= _output_options(request.output_config or {})
    extra = {name: value for name, value in (request.model_extra or {}).items() if name not in body}
    return json.dumps(body | extra, ensure_ascii=False).encode(errors="surrogatepass"), ClientRequest(request)


def _check_supported(request: MessagesRequest) -> None:
    """Raise `UnsupportedParameter` for a field that would change the output."""
    given = {
        "thinking": request.thinking is not None and request.thinking.get("type") != "disabled",
        "mcp_servers": request.mcp_servers,
        "container": request.container,
    }
    name = next((name for name, value in given.items() if value), None)
    if name is not None:
        raise UnsupportedParameter(f"'{name}' is not supported by this model's /v1/messages. Omit it", param=name)


def _system(system: str | list[Block]) -> str:
    if isinstance(system, str):
        return system
    return "\n\n".join(require_text(block.get("text"), f"system[{i}].text") for i, block in enumerate(system))


def _messages(message: MessageParam, where: str) -> list[Message]:
    """Translate a message; results of tools become messages of their own before its rest."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, where)]
    results: list[Message] = []
    parts: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        if block.get("type") == "tool_result":
            results.append(_tool_result(block, f"{where}[{i}]"))
        else:
            parts.append(_part(block, f"{where}[{i}]"))
    return [*results, {"role": message.role, "content": contents_of(parts)}] if parts or not results else results


def _assistant(blocks: list[Block], where: str) -> Message:
    texts, calls = [], []
    for i, block in enumerate(blocks):
        kind, place = block.get("type"), f"{where}[{i}]"
        if kind == "text":
            texts.append(require_text(block.get("text"), f"{place}.text"))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": require_text(block.get("name"), f"{place}.name"), "arguments": arguments}
            calls.append({"id": require_text(block.get("id"), f"{place}.id"), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):  # the model does not receive its earlier reasoning again
            raise _refusal_of(place, kind)
    content = "".join(texts) if texts or not calls else None
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _tool_result(block: Block, where: str) -> Message:
    content = block.get("content") or ""
    if isinstance(content, list):
        content = contents_of([_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)])
    elif not isinstance(content, str):
        raise InvalidRequest(f"Invalid value for '{where}.content': a string or a list of blocks is required.", param=where)
    call_id = require_text(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _part(block: Any, where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {"type": "text", "text": require_text(block.get("text"), f"{where}.text")}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(block.get("source"), f"{where}.source")}}
    raise _refusal_of(where, kind)


def _image_url(source: Any, where: str) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "base64":
        media_type = require_text(source.get("media_type"), f"{where}.media_type")
        return image_url_of(media_type, require_text(source.get("data"), f"{where}.data"), f"{where}.media_type")
    if kind == "url":
        return require_text(source.get("url"), f"{where}.url")
    raise _refusal_of(where, kind)


def _refusal_of(where: str, kind: Any) -> UnsupportedParameter:
    return UnsupportedParameter(f"'{where}' is of the type {kind!r}, which is not supported", param=where)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise UnsupportedParameter(f"'{where}' is of the type {tool.get('type')!r}; only your own tools are supported", param=where)
    function = {
        "name": require_text(tool.get("name"), f"{where}.name"),
        "parameters": tool.get("input_schema") or {"type": "object"},
    }
    names = ("description", "strict")
    return {"type": "function", "function": function | {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    options = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        named = {"type": "function", "function": {"name": require_text(choice.get("name"), "tool_choice.name")}}
        return {"tool_choice": named} | options
    if kind not in _TOOL_CHOICES:
        raise UnsupportedParameter(f"'tool_choice' of the type {kind!r} is not supported", param="tool_choice")
    return {"tool_choice": _TOOL_CHOICES[kind]} | options


def _output_options(config: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if (effort := config.get("effort")) is not None:
        options["reasoning_effort"] = effort
    form = config.get("format")
    if form is None:
        return options
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise UnsupportedParameter("'output_config.format' supports the type json_schema only", param="output_config.format")
    schema = {"name": "output", "schema": form.get("schema") or {}, "strict": True}
    return options | {"response_format": {"type": "json_schema", "json_schema": schema}}
