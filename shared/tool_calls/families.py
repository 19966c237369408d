"""The families of models whose tool calls Thaw reads and enforces (docs/adr/0100).

Sources: the chat templates of the models, and the examples of vLLM's tool parsers.
"""

from __future__ import annotations

import re
from typing import get_args

from shared.contracts.engines import ToolFormat
from shared.tool_calls.family import (
    BareArguments,
    CallObject,
    Channels,
    Family,
    JsonArguments,
    NamedCall,
    PythonArguments,
    TaggedArguments,
)

_XML = TaggedArguments("<parameter=", ">\n", "", "\n</parameter>\n", "</function>", has_newlines=True, is_end_optional=True)
_PAIRS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_SECTION = "<｜tool▁calls▁begin｜>"
_ARGUMENTS_AS_JSON = re.compile(r"arguments(?:'\]|\"\])?\s*\|\s*tojson")
"""A template that writes the arguments of earlier calls as JSON, so it takes objects."""

_IN_ORDER: tuple[Family, ...] = (
    Family(
        "openai",
        "gpt-oss (Harmony)",
        Channels(),
        (("<|channel|>", "<|message|>"),),
        tags=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        aliases=("harmony", "gpt_oss"),
    ),
    Family(
        "deepseek_v3",
        "DeepSeek V3 and R1",
        NamedCall(JsonArguments(), "function<｜tool▁sep｜>", "\n```json\n"),
        ((_SECTION, "```json"),),
        tags=(_SECTION, "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        begin=_SECTION,
        call_begin="<｜tool▁call▁begin｜>",
        call_end="\n```<｜tool▁call▁end｜>",
        separator="\n",
        end="<｜tool▁calls▁end｜>",
        has_text_arguments=True,
    ),
    Family(
        "deepseek_v31",
        "DeepSeek V3.1",
        NamedCall(JsonArguments(), "", "<｜tool▁sep｜>"),
        ((_SECTION,),),
        tags=(_SECTION, "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        begin=_SECTION,
        call_begin="<｜tool▁call▁begin｜>",
        call_end="<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
        has_text_arguments=True,
    ),
    Family(
        "kimi_k2",
        "Kimi K2",
        NamedCall(JsonArguments(), "", "<|tool_call_argument_begin|>", prefix="functions.", is_indexed=True),
        (("<|tool_calls_section_begin|>",),),
        tags=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        begin="<|tool_calls_section_begin|>",
        call_begin="<|tool_call_begin|>",
        call_end="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
        other_begins=("<|tool_call_begin|>",),
    ),
    Family(
        "minimax_m2",
        "MiniMax M2",
        NamedCall(
            TaggedArguments('<parameter name="', '">', "", "</parameter>\n", "</invoke>"),
            '<invoke name="',
            '">\n',
        ),
        (("<minimax:tool_call>",),),
        tags=("<minimax:tool_call>", "</minimax:tool_call>"),
        begin="<minimax:tool_call>\n",
        call_end="\n",
        end="</minimax:tool_call>",
    ),
    Family(
        "seed_oss",
        "Seed-OSS",
        NamedCall(
            TaggedArguments("<parameter=", ">", "", "</parameter>\n", "</function>", is_end_optional=True),
            "<function=",
            ">\n",
        ),
        (("<seed:tool_call>",),),
        tags=("<seed:tool_call>", "</seed:tool_call>"),
        call_begin="<seed:tool_call>\n",
        call_end="\n</seed:tool_call>",
        separator="\n",
    ),
    Family(
        "gemma4",
        "Gemma 4",
        NamedCall(BareArguments('<|"|>'), "call:"),
        (("<|tool_call>",),),
        tags=("<|tool_call>", "<tool_call|>", '<|"|>'),
        call_begin="<|tool_call>",
        call_end="<tool_call|>",
    ),
    Family(
        "functiongemma",
        "FunctionGemma",
        NamedCall(BareArguments("<escape>"), "call:"),
        (("<start_function_call>",),),
        tags=("<start_function_call>", "<end_function_call>", "<escape>"),
        call_begin="<start_function_call>",
        call_end="<end_function_call>",
    ),
    Family(
        "mistral_v11",
        "Mistral with tokenizers from v11 on (Small 3.2, Magistral, Devstral)",
        NamedCall(JsonArguments(), "", "[ARGS]", id_begin="[CALL_ID]"),
        (("[TOOL_CALLS]", "[ARGS]"),),
        tags=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        call_begin="[TOOL_CALLS]",
    ),
    Family(
        "mistral",
        "Mistral with tokenizers before v11",
        CallObject(),
        (("[TOOL_CALLS]",),),
        tags=("[TOOL_CALLS]",),
        begin="[TOOL_CALLS] ",
        list_begin="[",
        separator=", ",
        end="]",
    ),
    Family(
        "qwen3_coder",
        "Qwen 3 Coder, Qwen 3.5",
        NamedCall(_XML, "<function=", ">\n"),
        (("<tool_call>", "<function="),),
        tags=("<tool_call>", "</tool_call>"),
        call_begin="<tool_call>\n",
        call_end="\n</tool_call>",
        separator="\n",
        other_begins=("<function=",),
        aliases=("qwen3_xml",),
    ),
    Family(
        "glm47",
        "GLM 4.7 and 5",
        NamedCall(TaggedArguments("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")),
        (("<tool_call>", "</arg_key><arg_value>"),),
        tags=_PAIRS,
        call_begin="<tool_call>",
    ),
    Family(
        "glm45",
        "GLM 4.5 and 4.6",
        NamedCall(TaggedArguments("<arg_key>", "</arg_key>\n", "<arg_value>", "</arg_value>\n", "</tool_call>"), "", "\n"),
        (("<tool_call>", "<arg_key>"),),
        tags=_PAIRS,
        call_begin="<tool_call>",
        separator="\n",
    ),
    Family(
        "hermes",
        "Hermes, Qwen 2.5 and 3, Granite 4",
        CallObject(),
        (("<tool_call>",),),
        tags=("<tool_call>", "</tool_call>"),
        call_begin="<tool_call>\n",
        call_end="\n</tool_call>",
        separator="\n",
        aliases=("granite4",),
    ),
    Family(
        "phi4_mini_json",
        "Phi-4-mini",
        CallObject(),
        (("functools[",),),
        begin="functools",
        list_begin="[",
        separator=", ",
        end="]",
        has_text_arguments=True,
    ),
    Family(
        "granite",
        "Granite 3",
        CallObject(),
        (("<|tool_call|>",),),
        tags=("<|tool_call|>",),
        begin="<|tool_call|>",
        list_begin="[",
        separator=", ",
        end="]",
        other_begins=("<tool_call>",),
    ),
    Family(
        "gemma3",
        "Gemma 3 with a template that asks for tool_code",
        NamedCall(PythonArguments(), "", "("),
        (("```tool_code",),),
        begin="```tool_code\n",
        call_end="\n",
        end="```",
    ),
    Family(
        "llama4_pythonic",
        "Llama 4 with vLLM's template of Python calls",
        NamedCall(PythonArguments(), "", "("),
        (("<|python_start|>", "func_name1("), ("<|header_start|>", "func_name1(")),
        tags=("<|python_start|>", "<|python_end|>"),
        begin="<|python_start|>",
        list_begin="[",
        separator=", ",
        end="]<|python_end|>",
        is_anchored=True,
    ),
    Family(
        "pythonic",
        "Llama 3.2 with vLLM's template of Python calls, ToolACE",
        NamedCall(PythonArguments(), "", "("),
        (("func_name1(",),),
        list_begin="[",
        separator=", ",
        end="]",
        is_anchored=True,
    ),
    Family(
        "llama3",
        "Llama 3.1 to 3.3, and 4 with its own template",
        CallObject("parameters", needs_arguments=True),
        (('"parameters":', "<|python_tag|>"), ('"parameters":', "ipython")),
        tags=("<|python_tag|>",),
        separator="; ",
        is_anchored=True,
        other_begins=("<|python_tag|>",),
        aliases=("llama3_json", "llama4_json"),
    ),
)
"""Most specific first: a template is of the first family whose marks it has."""

FAMILIES: dict[ToolFormat, Family] = {name: family for name in get_args(ToolFormat) for family in _IN_ORDER if family.name == name}
ALIASES: dict[str, ToolFormat] = {alias: name for name, family in FAMILIES.items() for alias in (name, *family.aliases)}
"""Families by their names here and in vLLM."""


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the family of a chat template; None if it is not known."""
    for family in _IN_ORDER:
        if any(all(mark in template for mark in marks) for marks in family.template_marks):
            return ALIASES[family.name]
    return None


def takes_text_arguments(form: ToolFormat, template: str) -> bool:
    """True if the chat template takes the arguments of earlier calls as text, not as objects."""
    return FAMILIES[form].has_text_arguments and _ARGUMENTS_AS_JSON.search(template) is None


def tool_format_of(given: str | None, template: str) -> ToolFormat | None:
    """Return the family of a model.

    Args:
        given: A name of `ALIASES` that the model's options have; None: that of its template.
        template: Its chat template.
    """
    if given is None:
        return detect_tool_format(template)
    if given == "mistral" and "[ARGS]" in template:  # vLLM has one name for both
        return "mistral_v11"
    return ALIASES.get(given)
