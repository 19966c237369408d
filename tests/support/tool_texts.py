"""Write tool calls as the chat template of each family of models does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shared.contracts.engines import ToolFormat

GEMMA_QUOTE = '<|"|>'
Call = tuple[str, dict[str, Any]]


def write_calls(form: ToolFormat, calls: Sequence[Call]) -> str:
    """Write the calls of one response."""
    match form:
        case "hermes":
            return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)
        case "llama3":
            return "; ".join(_object(call, "parameters") for call in calls)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(map(_object, calls))}]"
        case "granite":
            return f"<|tool_call|>[{', '.join(map(_object, calls))}]"
        case "phi4_mini_json":
            return f"functools[{', '.join(map(_object, calls))}]"
        case "mistral_v11":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls)
        case "deepseek_v3":
            fenced = "```json\n{}\n```"
            each = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{fenced.replace('{}', _json(given))}<｜tool▁call▁end｜>"
                for name, given in calls
            )
            return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"
        case "deepseek_v31":
            each = "".join(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>" for name, given in calls)
            return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"
        case "kimi_k2":
            each = "".join(
                f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(given)}<|tool_call_end|>"
                for i, (name, given) in enumerate(calls)
            )
            return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"
        case "qwen3_coder":
            return "\n".join(f"<tool_call>\n{_xml(call)}\n</tool_call>" for call in calls)
        case "seed_oss":
            return "\n".join(f"<seed:tool_call>\n{_xml(call, '')}\n</seed:tool_call>" for call in calls)
        case "minimax_m2":
            each = "\n".join(_invoke(call) for call in calls)
            return f"<minimax:tool_call>\n{each}\n</minimax:tool_call>"
        case "glm45":
            return "\n".join(f"<tool_call>{name}\n{_pairs(given, chr(10))}</tool_call>" for name, given in calls)
        case "glm47":
            return "".join(f"<tool_call>{name}{_pairs(given)}</tool_call>" for name, given in calls)
        case "openai":
            message = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
            return "<|start|>assistant".join(message.format(name, _json(given)) for name, given in calls)
        case "gemma3":
            return "```tool_code\n" + "\n".join(map(_python, calls)) + "\n```"
        case "pythonic":
            return f"[{', '.join(map(_python, calls))}]"
        case "llama4_pythonic":
            return f"<|python_start|>[{', '.join(map(_python, calls))}]<|python_end|>"
        case "functiongemma":
            return "".join(
                f"<start_function_call>call:{name}{_bare(given, '<escape>')}<end_function_call>" for name, given in calls
            )
        case "gemma4":
            return "".join(f"<|tool_call>call:{name}{_bare(given, GEMMA_QUOTE)}<tool_call|>" for name, given in calls)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: Call, key: str = "arguments") -> str:
    return _json({"name": call[0], key: call[1]})


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _xml(call: Call, around: str = "\n") -> str:
    return (
        f"<function={call[0]}>\n"
        + "".join(f"<parameter={k}>{around}{_plain(v)}{around}</parameter>\n" for k, v in call[1].items())
        + "</function>"
    )


def _invoke(call: Call) -> str:
    arguments = "".join(f'<parameter name="{k}">{_plain(v)}</parameter>\n' for k, v in call[1].items())
    return f'<invoke name="{call[0]}">\n{arguments}</invoke>'


def _pairs(given: dict[str, Any], after: str = "") -> str:
    return "".join(f"<arg_key>{k}</arg_key>{after}<arg_value>{_plain(v)}</arg_value>{after}" for k, v in given.items())


def _python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{k}={v!r}' for k, v in call[1].items())})"


def _bare(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_bare(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_bare(v, quote) for v in value) + "]"
    return _json(value)
