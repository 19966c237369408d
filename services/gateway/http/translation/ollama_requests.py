"""Requests of Ollama's API, translated to OpenAI's.

Fields: docs/api.md of Ollama. Images, tools and formats become OpenAI's content parts, tools and
`response_format`, and sampling options get OpenAI's and vLLM's names. The engine of the model then
decides what it supports, as for a request of OpenAI's API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.http.parsing.validation import validate_body
from services.gateway.http.translation.chat_translator import image_url_of
from shared.compact_json import encode_json
from shared.contracts.inference import Endpoint
from shared.contracts.openai import Objects, Texts
from shared.errors import InvalidRequest, UnsupportedParameter

DEFAULT_TAG = ":latest"
_RENAMED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
}
"""Options by their names in OpenAI's API and vLLM's."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "typical_p": (1,), "tfs_z": (1,)}
"""Options that would change the output and that no request of OpenAI's API has, each with the
values with which they change nothing.
"""
_IMAGE_TYPES = (("iVBOR", "png"), ("/9j/", "jpeg"), ("R0lGOD", "gif"), ("UklGR", "webp"))
"""Beginnings of images in base64. They stay in the outline of a body that exceeds a message."""
_DATA_URL = re.compile(r"data:(.{1,80}?);base64,", re.ASCII)
_ZERO_DURATION = re.compile(r"0+(\.0*)?(ns|us|ms|s|m|h)?")
_LOADING_PROMPT = "."
"""Prompt of the one token that a request without a prompt generates, to wake its model."""

Kind = Literal["chat", "generate", "embed", "embeddings"]


@dataclass(frozen=True)
class OllamaReply:
    """The facts of a request that the translation of its response needs.

    Attributes:
        model: The model's name as the client wrote it.
        is_load: The request had no prompt: it only wakes the model.
        ignored: Options without effect here.
    """

    kind: Kind
    model: str
    is_load: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class TranslatedRequest:
    """A request in OpenAI's form, and how its response is translated back."""

    endpoint: Endpoint
    body: bytes
    reply: OllamaReply


class _Ollama(BaseModel):
    model_config = ConfigDict(frozen=True)

    model: str = Field(min_length=1)
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None

    @property
    def unloads(self) -> bool:
        """True if `keep_alive` is 0, in any of its forms."""
        given = self.keep_alive
        return bool(_ZERO_DURATION.fullmatch(given.strip())) if isinstance(given, str) else given == 0


class _Generating(_Ollama):
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False


class OllamaMessage(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(frozen=True)

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Texts | None = None
    tool_calls: Objects | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChat(_Generating):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: Objects | None = None


class OllamaGenerate(_Generating):
    """POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Annotated[list[int], Field(fail_fast=True)] | None = None
    raw: bool | None = None
    images: Texts | None = None


class OllamaEmbed(_Ollama):
    """POST /api/embed."""

    input: str | Texts = Field(default_factory=list)
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddings(_Ollama):
    """POST /api/embeddings, the older form of /api/embed."""

    prompt: str | None = None


class OllamaShow(BaseModel):
    """POST /api/show.

    Attributes:
        name: Older name of `model`.
    """

    model_config = ConfigDict(frozen=True)

    model: str = ""
    name: str = ""


class OllamaPull(BaseModel):
    """POST /api/pull.

    Attributes:
        name: Older name of `model`.
    """

    model_config = ConfigDict(frozen=True)

    model: str = ""
    name: str = ""
    stream: bool = True


def translate_request(route: str, body: bytes) -> TranslatedRequest:
    """Translate a body of one of `OLLAMA_ROUTES`.

    Raises:
        InvalidRequest: The body is no valid request.
        UnsupportedParameter: A parameter would change the output and has no equivalent.
    """
    return OLLAMA_ROUTES[route](body)


def served_name(model: str) -> str:
    """Return a model's name without Ollama's default tag, which clients append to names."""
    return model.removesuffix(DEFAULT_TAG)


def _chat(body: bytes) -> TranslatedRequest:
    request = validate_body(OllamaChat, body)
    if not request.messages:
        return _load("chat", request)
    fields: dict[str, Any] = {"messages": list(_messages(request.messages))}
    if request.tools:
        fields["tools"] = request.tools
    return _generation("chat", "chat", request, fields)


def _generate(body: bytes) -> TranslatedRequest:
    request = validate_body(OllamaGenerate, body)
    if not request.prompt and not request.images and not request.suffix:
        return _load("generate", request)
    for name in ("template", "context"):
        if getattr(request, name):
            raise UnsupportedParameter(
                f"'{name}' is not supported: the model's own chat template is used. Send raw: true with a whole prompt, or POST /api/chat",
                param=name,
            )
    if request.raw or request.suffix:
        if request.images or request.system:
            name = "images" if request.images else "system"
            raise UnsupportedParameter(f"'{name}' has no effect on a prompt without a template. Omit it", param=name)
        fields: dict[str, Any] = {"prompt": request.prompt or ""}
        if request.suffix:
            fields["suffix"] = request.suffix
        return _generation("generate", "completion", request, fields)
    messages = [OllamaMessage(role="system", content=request.system)] if request.system else []
    messages.append(OllamaMessage(role="user", content=request.prompt, images=request.images))
    return _generation("generate", "chat", request, {"messages": list(_messages(messages))})


def _embed(body: bytes) -> TranslatedRequest:
    request = validate_body(OllamaEmbed, body)
    return _embedding("embed", request, request.input, {"dimensions": request.dimensions} if request.dimensions else {})


def _embeddings(body: bytes) -> TranslatedRequest:
    request = validate_body(OllamaEmbeddings, body)
    return _embedding("embeddings", request, request.prompt or "", {})


OLLAMA_ROUTES: dict[str, Callable[[bytes], TranslatedRequest]] = {
    "/api/chat": _chat,
    "/api/generate": _generate,
    "/api/embed": _embed,
    "/api/embeddings": _embeddings,
}
"""Translations by path."""


def _generation(kind: Kind, endpoint: Endpoint, request: _Generating, fields: dict[str, Any]) -> TranslatedRequest:
    options, ignored = _options(request.options or {})
    fields |= options | {"model": served_name(request.model)}
    if endpoint == "completion":
        fields.setdefault("max_tokens", None)  # a text completion without the field has 16 tokens
    if request.streams:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if (response_format := _response_format(request.format)) is not None:
        fields["response_format"] = response_format
    if isinstance(request.think, bool):
        fields["chat_template_kwargs"] = {"enable_thinking": request.think}
    elif request.think:
        fields["reasoning_effort"] = request.think
    if request.logprobs:
        fields |= (
            {"logprobs": True, "top_logprobs": request.top_logprobs}
            if endpoint == "chat"
            else {"logprobs": request.top_logprobs or 0}
        )
    return _encode(endpoint, fields, OllamaReply(kind, request.model, ignored=ignored))


def _load(kind: Kind, request: _Generating) -> TranslatedRequest:
    """Wake the model with a request for one token. Raises `InvalidRequest` for an unload."""
    _refuse_unload(request)
    fields = {"model": served_name(request.model), "prompt": _LOADING_PROMPT, "max_tokens": 1}
    return _encode("completion", fields, OllamaReply(kind, request.model, is_load=True))


def _embedding(kind: Kind, request: _Ollama, texts: str | list[str], fields: dict[str, Any]) -> TranslatedRequest:
    if not texts:
        _refuse_unload(request)
    fields |= {"model": served_name(request.model), "input": texts or _LOADING_PROMPT, "encoding_format": "base64"}
    ignored = tuple(f"options.{name}" for name in request.options or ())
    return _encode("embedding", fields, OllamaReply(kind, request.model, is_load=not texts, ignored=ignored))


def _refuse_unload(request: _Ollama) -> None:
    if request.unloads:
        name = served_name(request.model)
        raise InvalidRequest(
            f"A client cannot unload a model that others use. Run `thaw sleep {name}`, or set its keep_alive in thaw.yaml",
            param="keep_alive",
        )


def _encode(endpoint: Endpoint, fields: dict[str, Any], reply: OllamaReply) -> TranslatedRequest:
    return TranslatedRequest(endpoint, encode_json(fields), reply)


def _options(options: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Translate sampling options. Returns them, and the names of those without effect.

    Raises `UnsupportedParameter`.
    """
    fields: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        if name in _RENAMED:
            fields[_RENAMED[name]] = value
        elif name == "num_predict":
            # 0 and less: no limit but the context.
            if not isinstance(value, int) or value > 0:
                fields["max_tokens"] = value
        elif name == "stop":
            if value:
                fields["stop"] = value
        elif name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise UnsupportedParameter(
                f"'options.{name}' would change the output and is not supported. Omit it", param=f"options.{name}"
            )
        else:
            ignored.append(f"options.{name}")
    return fields, tuple(ignored)


def _response_format(value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not value:
        return None
    if isinstance(value, str):
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": value, "strict": True}}


def _messages(messages: list[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Translate messages. Ollama's tool calls have no ids: results answer them in their order."""
    open_calls: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        fields: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [_tool_call(call, f"call_{number}_{i}", f"messages[{number}]") for i, call in enumerate(message.tool_calls)]
            fields["tool_calls"] = calls
            open_calls = [(call["id"], call["function"]["name"]) for call in calls]
        if message.role == "tool":
            if message.tool_name:
                fields["name"] = message.tool_name
            fields["tool_call_id"] = message.tool_call_id or _take_call(open_calls, message.tool_name)
        yield fields


def _content(message: OllamaMessage) -> str | list[dict[str, Any]]:
    text = message.content or ""
    if not message.images:
        return text
    urls = [_image_url(data, f"images[{i}]") for i, data in enumerate(message.images)]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"type": "text", "text": text}, *images] if text else images


def _image_url(data: str, param: str) -> str:
    if data.startswith("data:"):
        given = _DATA_URL.match(data)
        return image_url_of(given[1] if given else "", data[given.end() if given else 0 :], param)
    kind = next((kind for start, kind in _IMAGE_TYPES if data.startswith(start)), "png")
    return image_url_of(f"image/{kind}", data, param)


def _tool_call(call: dict[str, Any], new_id: str, where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"A tool call in {where} has no function with a name", param=f"{where}.tool_calls")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    given_id = call.get("id")
    return {
        "id": given_id if isinstance(given_id, str) and given_id else new_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


def _take_call(open_calls: list[tuple[str, str]], name: str | None) -> str:
    """Return the id of the first call that has no result yet, of the tool `name` if it is given."""
    found = next((call for call in open_calls if name is None or call[1] == name), None)
    if found is None:
        return f"call_{name or 'unknown'}"
    open_calls.remove(found)
    return found[0]
