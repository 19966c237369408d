"""Tool calls as OpenAI's API has them: as deltas of a stream, and in a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway.domain.tool_calls import Arguments, CallStarted, Piece, Text, ToolCallParser, call_id
from shared.contracts.engines import ToolFormat
from shared.contracts.openai import ChatCompletionRequest


@dataclass(frozen=True)
class ToolOptions:
    """What a request says of its tools.

    Attributes:
        names: The tools' names.
        parallel: False: at most one call in a response.
    """

    names: frozenset[str]
    parallel: bool = True


def tool_options_of(request: ChatCompletionRequest) -> ToolOptions | None:
    """Return the options of a request; None if its response has no tool calls."""
    if not request.tools or request.tool_choice == "none":
        return None
    functions = [tool.get("function") for tool in request.tools]
    names = frozenset(str(function.get("name")) for function in functions if isinstance(function, dict))
    return ToolOptions(names, (request.model_extra or {}).get("parallel_tool_calls") is not False)


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

    def on_started(self, form: ToolFormat | None) -> None:
        """Read what an engine named. An engine that continues a response names the same form."""
        self.form = form or self.form

    def add(self, index: int, text: str, reason: str | None) -> tuple[list[dict[str, Any]], str | None]:
        """Return the deltas of new text of a choice, and the finish reason that clients get."""
        parser = self._parser(index)
        pieces = parser.feed(text)
        if reason is not None:
            pieces += parser.finish()
            if reason == "stop" and parser.calls:
                reason = "tool_calls"
        return [self._delta(index, piece) for piece in pieces], reason

    def message(self, index: int, text: str, reason: str) -> tuple[dict[str, Any], str]:
        """Return the content and the calls of a whole choice, and its finish reason."""
        parser = self._parser(index)
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        for piece in parser.feed(text) + parser.finish():
            match piece:
                case Text(text=added):
                    content.append(added)
                case CallStarted(call=call, name=name):
                    calls.append(_call(call_id(self._response_id, index, call), name))
                case Arguments(text=added):
                    calls[-1]["function"]["arguments"] += added
        if not calls:
            return {"content": "".join(content)}, reason
        return {"content": "".join(content) or None, "tool_calls": calls}, "tool_calls" if reason == "stop" else reason

    def _parser(self, index: int) -> ToolCallParser:
        if index not in self._parsers:
            assert self.form is not None
            self._parsers[index] = ToolCallParser(self.form, self._options.names, parallel=self._options.parallel)
        return self._parsers[index]

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        match piece:
            case Text(text=text):
                return {"content": text}
            case CallStarted(call=call, name=name):
                return {"tool_calls": [{"index": call} | _call(call_id(self._response_id, index, call), name)]}
            case Arguments(call=call, text=text):
                return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}


def _call(call: str, name: str) -> dict[str, Any]:
    return {"id": call, "type": "function", "function": {"name": name, "arguments": ""}}
