"""Requests of OpenAI's Responses API as chat completions.

Fields and items as in the reference of `POST /v1/responses`. Fields outside the schema are added to
the chat completion, so that an engine's own parameters (`top_k`, `seed`) work here as well.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.http.translation.chat_translator import ClientRequest, contents_of, require_text
from shared.contracts.openai import Objects
from shared.errors import InvalidRequest, UnsupportedParameter

Item = dict[str, Any]
Message = dict[str, Any]
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_SAME = ("model", "temperature", "top_p", "user", "parallel_tool_calls", "stream")
"""Fields that a chat completion has under the same name."""
_LOGPROBS = "message.output_text.logprobs"


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(BaseModel):
    """The body of `POST /v1/responses`."""

    model_config = ConfigDict(extra="allow", frozen=True)
    model: str
    input: str | Objects
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    text: TextOptions | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


def to_chat(request: ResponsesRequest, history: list[Item]) -> tuple[bytes, ClientRequest]:
    """Translate a request.

    Args:
        history: Items of the conversation that `previous_response_id` names.

    Returns:
        The body of the chat completion, and what its response is translated by.

    Raises:
        InvalidRequest: An item or a field is malformed.
        UnsupportedParameter: A field or an item would change the output, and has no equivalent.
    """
    _check_supported(request)
    given = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    messages = _messages(history, "previous_response_id") + _messages(given, "input")
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    if not messages:
        raise InvalidRequest("'input' is empty", param="input")
    body: dict[str, Any] = {"messages": _merge_leading(messages)}
    body |= {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.max_output_tokens is not None:
        body["max_tokens"] = request.max_output_tokens
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.tools:
        body["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        body["tool_choice"] = _tool_choice(request.tool_choice)
    body |= _text_options(request.text) | _reasoning_options(request.reasoning)
    extra = {name: value for name, value in (request.model_extra or {}).items() if name not in body}
    encoded = json.dumps(body | extra, ensure_ascii=False).encode(errors="surrogatepass")
    return encoded, ClientRequest(request, (*history, *given))


def _check_supported(request: ResponsesRequest) -> None:
    """Raise `UnsupportedParameter` for a field that would change the output."""
    given = {
        "background": request.background,
        "conversation": request.conversation,
        "prompt": request.prompt,
        "truncation": request.truncation == "auto",
    }
    name = next((name for name, value in given.items() if value), None)
    if name is not None:
        raise UnsupportedParameter(f"'{name}' is not supported by this model's /v1/responses. Omit it", param=name)


def _messages(items: list[Item], param: str) -> list[Message]:
    messages: list[Message] = []
    for i, item in enumerate(items):
        where = f"{param}[{i}]"
        kind = item.get("type") or "message"
        if kind == "message":
            messages.append(_message(item, where))
        elif kind == "function_call":
            _add_call(messages, item, where)
        elif kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else _contents(output, f"{where}.output")
            call_id = require_text(item.get("call_id"), f"{where}.call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind != "reasoning":  # the model does not receive its earlier reasoning again
            raise UnsupportedParameter(f"'{where}' is of the type {kind!r}, which is not supported", param=where)
    return messages


def _message(item: Item, where: str) -> Message:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequest(f"Invalid value for '{where}.role': user, assistant, system or developer is required.", param=where)
    content = item.get("content")
    # Chat templates of most models know no developer.
    name = "system" if role == "developer" else role
    return {"role": name, "content": content if isinstance(content, str) else _contents(content, f"{where}.content")}


def _contents(parts: Any, where: str) -> str | list[dict[str, Any]]:
    if not isinstance(parts, list):
        raise InvalidRequest(f"Invalid value for '{where}': a string or a list of parts is required.", param=where)
    return contents_of([_part(part, f"{where}[{i}]") for i, part in enumerate(parts)])


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS:
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        return {"type": "text", "text": require_text(text, f"{where}.text")}
    if kind == "input_image" and part.get("image_url"):
        image = {"url": require_text(part["image_url"], f"{where}.image_url")}
        detail = part.get("detail")
        return {"type": "image_url", "image_url": image | ({"detail": detail} if isinstance(detail, str) else {})}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    raise UnsupportedParameter(f"'{where}' is of the type {kind!r}, which is not supported", param=where)


def _add_call(messages: list[Message], item: Item, where: str) -> None:
    """Add a call to the assistant's message before it, or else to a new one."""
    function = {name: require_text(item.get(name), f"{where}.{name}") for name in ("name", "arguments")}
    call = {"id": require_text(item.get("call_id"), f"{where}.call_id"), "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _merge_leading(messages: list[Message]) -> list[Message]:
    """Merge the system messages at the start, of which most chat templates take one."""
    count = next((i for i, m in enumerate(messages) if m["role"] != "system" or not isinstance(m["content"], str)), len(messages))
    if count < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(m["content"] for m in messages[:count])}, *messages[count:]]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise UnsupportedParameter(f"'{where}' is of the type {tool.get('type')!r}; only functions are supported", param=where)
    require_text(tool.get("name"), f"{where}.name")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise UnsupportedParameter(f"'tool_choice' of the type {choice.get('type')!r} is not supported", param="tool_choice")
    return {"type": "function", "function": {"name": require_text(choice.get("name"), "tool_choice.name")}}


def _text_options(text: TextOptions | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if text is None:
        return options
    if text.verbosity is not None:
        options["verbosity"] = text.verbosity
    form = text.format or {}
    kind = form.get("type", "text")
    if kind == "json_schema":
        names = ("name", "description", "schema", "strict")
        options["response_format"] = {
            "type": kind,
            "json_schema": {name: form[name] for name in names if form.get(name) is not None},
        }
    elif kind == "json_object":
        options["response_format"] = {"type": kind}
    elif kind != "text":
        raise UnsupportedParameter(f"'text.format' of the type {kind!r} is not supported", param="text.format")
    return options


def _reasoning_options(reasoning: dict[str, Any] | None) -> dict[str, Any]:
    effort = (reasoning or {}).get("effort")
    return {} if effort is None else {"reasoning_effort": effort}
