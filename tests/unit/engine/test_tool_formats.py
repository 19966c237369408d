"""Forms of tool calls that models are trained for, by their templates and by vLLM's names."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shared.contracts.engines import ToolFormat
from shared.contracts.models import ModelSpec
from shared.tool_calls.families import detect_tool_format, takes_text_arguments, tool_format_of

TEMPLATES: list[tuple[str, ToolFormat | None]] = [
    ('…<tool_call>{"name"…', "hermes"),
    ("<tool_call><function=…", "qwen3_coder"),
    ("<tool_call>{name}\\n<arg_key>…</arg_key>\\n<arg_value>…", "glm45"),
    ("<tool_call>{name}<arg_key>…</arg_key><arg_value>…", "glm47"),
    ('"[TOOL_CALLS]" + …', "mistral"),
    ("[TOOL_CALLS]…[ARGS]", "mistral_v11"),
    ('{"name": function name, "parameters": …} ipython', "llama3"),
    ("[func_name1(params_name1=…)] ipython", "pythonic"),
    ("<|python_start|>[func_name1(params_name1=…)]", "llama4_pythonic"),
    ("<|header_start|>system<|header_end|> [func_name1(param1=value1…), func_name2(...)]", "llama4_pythonic"),
    ('<|header_start|>ipython {"name": function name, "parameters": …}', "llama3"),
    ("<start_of_turn>user Example Format: [func_name1(…)]", "pythonic"),
    ("<｜tool▁calls▁begin｜>…```json", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>…", "deepseek_v31"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|start|>assistant<|channel|>final<|message|>", "openai"),
    ("respond with <|tool_call|> followed by", "granite"),
    ("functools[{…}] <|tool_call|>", "phi4_mini_json"),
    ("<|tool_call>call:", "gemma4"),
    ("<start_function_call>call:", "functiongemma"),
    ("```tool_code", "gemma3"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call><function=", "seed_oss"),
    ("{{ tools }}", None),
    # Forms of vLLM's other examples, which no family has.
    ("<function_call> {… <|start_of_role|>", None),
    ('<tool_calls>\\n{"name": <tool-name-1>, "arguments": …}', None),
    ("<|action_start|><|plugin|>", None),
    ("<function_calls>\\nget_weather(city='New York')", None),
    ('<TOOLCALL>[{"name": …}]</TOOLCALL>', None),
    ("<longcat_tool_call>", None),
    ("<|start|>assistant to=…<|message|><atem:function_calls>", None),
]


@pytest.mark.parametrize(("template", "form"), TEMPLATES)
def test_forms_are_detected_in_templates(template: str, form: ToolFormat | None) -> None:
    assert detect_tool_format(template) == form


@pytest.mark.parametrize(
    ("form", "template", "is_text"),
    [
        ("deepseek_v3", "tool['function']['name'] + … + tool['function']['arguments'] + …", True),
        ("deepseek_v3", "tool['function']['name'] + … + tool['function']['arguments']|tojson + …", False),
        ("deepseek_v31", "tool.function.arguments | tojson", False),
        ("phi4_mini_json", '"arguments": {{ call.function.arguments }}', True),
        ("hermes", "{{ tool_call.arguments | tojson }}", False),
        ("hermes", "{{ tool_call.arguments }}", False),
    ],
)
def test_the_template_decides_whether_it_takes_arguments_as_text(form: ToolFormat, template: str, is_text: bool) -> None:
    assert takes_text_arguments(form, template) is is_text


def test_names_of_vllm_override_the_template() -> None:
    assert tool_format_of("llama3_json", "<tool_call>") == "llama3"
    assert tool_format_of("qwen3_xml", "") == "qwen3_coder"
    assert tool_format_of("mistral", "[TOOL_CALLS]") == "mistral"
    assert tool_format_of("mistral", "[TOOL_CALLS]…[ARGS]") == "mistral_v11"
    assert tool_format_of(None, "<tool_call>") == "hermes"
    spec = ModelSpec(name="m", source="/m", engine_args={"tool_call_parser": "deepseek_v31"})
    assert spec.tool_call_parser == "deepseek_v31"
    assert spec.model_copy(update={"tool_parser": "hermes"}).tool_call_parser == "hermes"
    with pytest.raises(ValidationError, match="is not known"):
        ModelSpec(name="m", source="/m", engine_args={"tool_call_parser": ["hermes"]})
    with pytest.raises(ValidationError, match="tool_call_parser 'other' is not known"):
        ModelSpec(name="m", source="/m", engine_args={"tool_call_parser": "other"})
    assert ModelSpec(name="m", source="/m", engine="vllm", engine_args={"tool_call_parser": "other"}).engine_args
