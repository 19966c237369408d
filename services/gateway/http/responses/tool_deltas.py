"""Tool calls as OpenAI's API has them: as deltas of a stream, and in a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway.domain.tool_calls.parser import ToolCallParser
from services.gateway.domain.tool_calls.pieces import Arguments, CallStarted, Piece, Reasoning, Text, call_id
from services.gateway.domain.tool_calls.readers import Tools
from services.gateway.http.parsing.cooperative import TimeSlice
from shared.contracts.engines import ToolFormat
from shared.contracts.openai import ChatCompletionRequest
from shared.tool_calls.families import ALIASES

_READ_AT_ONCE = 1024
"""Characters of a whole choice between two looks at the time."""


@dataclass(frozen=True)
class ToolOptions:
    """The tools of a request.

    Attributes:
        tools: The schemas of the tools' arguments, by name.
        parallel: False: at most one call in a response.
    """

    tools: Tools
    parallel: bool = True


def tool_options_of(request: ChatCompletionRequest) -> ToolOptions | None:
    """Return the options of a request; None if its response has no tool calls."""
    if not request.tools or request.tool_choice == "none":
        return None
    functions = [tool.get("function") for tool in request.tools]
    tools = {str(each.get("name")): _schema_of(each) for each in functions if isinstance(each, dict)}
    return ToolOptions(tools, (request.model_extra or {}).get("parallel_tool_calls") is not False)


def _schema_of(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters")
    return schema if isinstance(schema, dict) else {}


class ToolDeltas:
    """Divides the text of a response's choices into content and calls.

    Attributes:
        form: As the engine named it; None: all text is content.
    """

    def __init__(self, options: ToolOptions, response_id: str) -> None:
        self._options = options
        self._response_id = response_id
        self._parsers: dict[int, ToolCallParser] = {}
        self.form: ToolFormat | None = None

    @property
    def is_active(self) -> bool:
        return self.form is not None

    def on_started(self, form: str | None) -> None:
        """Read what an engine named. An engine that continues a response names the same form.

        A form that only a newer engine knows is text.
        """
        self.form = ALIASES.get(form or "") or self.form

    def add(self, index: int, text: str, reason: str | None) -> tuple[list[dict[str, Any]], str | None]:
        """Return the deltas of new text of a choice, and the finish reason that clients get."""
        parser = self._parser(index)
        pieces = parser.feed(text)
        if reason is not None:
            pieces += parser.finish()
            if reason == "stop" and parser.calls:
                reason = "tool_calls"
        return [self._delta(index, piece) for piece in pieces], reason

    async def message(self, index: int, text: str, reason: str) -> tuple[dict[str, Any], str]:
        """Return the content and the calls of a whole choice, and its finish reason."""
        parser, pieces, time_slice = self._parser(index), list[Piece](), TimeSlice()
        for start in range(0, len(text), _READ_AT_ONCE):
            pieces += parser.feed(text[start : start + _READ_AT_ONCE])
            await time_slice.pause()
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for piece in pieces + parser.finish():
            match piece:
                case Text(text=added):
                    content.append(added)
                case Reasoning(text=added):
                    reasoning.append(added)
                case CallStarted(call=call, name=name):
                    calls.append(_call(call_id(self._response_id, index, call), name))
                case Arguments(text=added):
                    calls[-1]["function"]["arguments"] += added
        thought = {"reasoning_content": "".join(reasoning)} if reasoning else {}
        if not calls:
            return {"content": "".join(content), **thought}, reason
        return {"content": "".join(content) or None, **thought, "tool_calls": calls}, "tool_calls" if reason == "stop" else reason

    def _parser(self, index: int) -> ToolCallParser:
        if index not in self._parsers:
            assert self.form is not None
            self._parsers[index] = ToolCallParser(self.form, self._options.tools, parallel=self._options.parallel)
        return self._parsers[index]

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        match piece:
            case Text(text=text):
                return {"content": text}
            case Reasoning(text=text):
                return {"reasoning_content": text}
            case CallStarted(call=call, name=name):
                return {"tool_calls": [{"index": call} | _call(call_id(self._response_id, index, call), name)]}
            case Arguments(call=call, text=text):
                return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}


def _call(call: str, name: str) -> dict[str, Any]:
    return {"id": call, "type": "function", "function": {"name": name, "arguments": ""}}
