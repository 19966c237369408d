"""Rendering of a model's chat template as transformers renders it.

It uses jinja2's sandbox with the same filters and globals.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from shared.contracts.openai import ChatCompletionRequest, ChatMessage

_AVAILABLE = importlib.util.find_spec("jinja2") is not None
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Unrenderable(Exception):
    """The conversation cannot be rendered here; the engine reports why."""


class ChatTemplate:
    """Compiled templates by name, and the special tokens that they refer to."""

    def __init__(self, compiled: Mapping[str, Any], tokens: Mapping[str, str]) -> None:
        self._compiled = compiled
        self._tokens = tokens

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatTemplate | None:
        """Load a template; None if there is none that can be read, or no jinja2."""
        if not _AVAILABLE:
            return None
        from jinja2 import TemplateError

        try:
            sources = _sources(files)
            compiled = {name: _environment().from_string(text) for name, text in sources.items()}
            tokens = _tokens(files)
        except (ValueError, TypeError, AttributeError, KeyError, TemplateError):
            return None
        return cls(compiled, tokens) if compiled else None

    def render(self, request: ChatCompletionRequest) -> str:
        """Render the prompt. Raises `Unrenderable`."""
        tools = request.tools if request.tool_choice != "none" else None
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        template = self._compiled.get(name)
        if template is None:
            raise Unrenderable
        arguments = {
            "messages": [_message(m) for m in request.messages],
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": request.add_generation_prompt,
        }
        try:
            return str(template.render(**{**self._tokens, **(request.chat_template_kwargs or {}), **arguments}))
        except Exception as e:  # a template may raise anything; the engine reports it to the client
            raise Unrenderable from e


def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks output of the assistant; it changes no text."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _sources(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return templates by name, in transformers' order of precedence."""
    if (own := files.get("chat_template.jinja")) is not None:
        return {"default": own.decode()}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = json.loads(files.get(name, b"{}")).get("chat_template")
        if isinstance(found, str):
            return {"default": found}
        if isinstance(found, list):
            return {str(t["name"]): str(t["template"]) for t in found}
        if isinstance(found, dict):
            return {str(k): str(v) for k, v in found.items()}
    return {}


def _tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    tokens = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = json.loads(files.get(name, b"{}"))
        for special in _SPECIAL:
            value = config.get(special)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens[special] = value
    return tokens


def _message(message: ChatMessage) -> dict[str, Any]:
    """Convert a message as the builtin engine does for the template.

    Content becomes text, arguments of tool calls become objects, and None is left out.
    """
    plain = {k: v for k, v in message.model_dump(exclude_unset=True).items() if v is not None}
    if isinstance(message.content, list):
        texts = [part.get("text") for part in message.content if part.get("type") == "text"]
        if len(texts) != len(message.content) or not all(isinstance(t, str) for t in texts):
            raise Unrenderable
        plain["content"] = "\n".join(str(t) for t in texts)
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_tool_call(call) for call in plain["tool_calls"]]
    return plain


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as e:
        raise Unrenderable from e
    return {**call, "function": {**function, "arguments": arguments}}
