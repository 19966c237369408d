"""The forms of calls that the tests of vLLM and SGLang have for each family, with other values.

Sources: vLLM's tests/tool_parsers and tests/tool_use, SGLang's test_function_call_parser.py, and
the chat templates in vLLM's examples/. Where Thaw differs by intention, the case says so.
"""

from __future__ import annotations

import json
from typing import Any

from shared.contracts.engines import ToolFormat

Call = tuple[str, dict[str, Any] | str]
"""The name and the arguments; a text if they are malformed."""
Case = tuple[ToolFormat, str, str, list[Call]]

NULLABLE = [{"type": "null"}]
TOOLS: dict[str, dict[str, Any]] = {
    "forecast": {"type": "object", "properties": {"place": {"type": "string"}, "scale": {"type": "string", "enum": ["C", "F"]}}},
    "now": {"type": "object", "properties": {}},
    "sum_up": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "store-it.v2": {"type": "object", "properties": {"text": {"type": "string"}}},
    "record": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "whole": {"type": "integer"},
            "real": {"type": "float"},  # no type of JSON schema, but clients send it
            "flag": {"type": "boolean"},
            "nothing": {"type": ["string", "null"]},
            "items": {"type": "array"},
            "data": {"type": "object"},
            "some_whole": {"anyOf": [{"type": "integer"}, *NULLABLE]},
            "some_text": {"anyOf": [{"type": "string"}, {"type": "integer"}, *NULLABLE]},
            "some_data": {"anyOf": [{"type": "object"}, *NULLABLE]},
        },
    },
}
ROME = '{"place": "Rome"}'
ONE = '{"a":1}'
CUT = '{"a": 1'
MARKED = '{"text": "<|tool_call_end|> </tool_call> ```<｜tool▁call▁end｜>"}'
LINES = '{\n  "text": "<div>"\n} '
TYPED = '{"text": "hi", "whole": 4, "real": 0.5, "flag": true, "nothing": null, "items": ["a", 1], "data": {"k": {}}, "none": []}'
ESCAPED = r'{"text": "her \"yes\" {ok} [x]\nC:\\tmp \u00fc 🎉"}'

HERMES: list[Case] = [
    ("hermes", f'<tool_call>{{"name": "record", "arguments": {MARKED}}}</tool_call>', "", [("record", json.loads(MARKED))]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"flag": true}}</tool_call>', "", [("now", {"flag": True})]),
    (
        "hermes",
        '<tool_call>{"name": "forecast",\n"arguments": {"place":\n"Rome"}}\n</tool_call>',
        "",
        [("forecast", {"place": "Rome"})],
    ),
    (
        "hermes",
        f'I look.<tool_call>{{"name": "forecast", "arguments": {ROME}}}</tool_call><tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>',
        "I look.",
        [("forecast", {"place": "Rome"}), ("now", {})],
    ),
    ("hermes", f'<tool_call>\n{{"name": "record", "arguments": {ESCAPED}}}', "", [("record", json.loads(ESCAPED))]),  # to the end
    (  # Granite 4 writes the arguments as text, and content between calls
        "hermes",
        'First: \n<tool_call> {"name": "forecast", "arguments": "{\\"place\\": \\"Rome\\"}"} </tool_call> Then \n '
        '<tool_call> {"name": "now", "arguments": {}} </tool_call> Done.',
        "First: Then Done.",
        [("forecast", {"place": "Rome"}), ("now", {})],
    ),
    # vLLM passes a text that is no object on as the arguments. The API has objects only.
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": "hi"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "hi"}</tool_call>',
        [],
    ),
    (  # a bracket is missing: the next call is complete
        "hermes",
        '<tool_call>\n{"name": "sum_up", "arguments": {"a": 1\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        [("sum_up", '{"a": 1\n'), ("now", {})],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "sum_up", "arguments": {"a": 1}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        [("sum_up", {"a": 1}), ("now", {})],
    ),
]

XML_CALL = "<tool_call>\n<function=forecast>\n<parameter=place>\nRome\n</parameter>\n<parameter=scale>\nC\n</parameter>\n</function>\n</tool_call>"
QWEN: list[Case] = [
    ("qwen3_coder", XML_CALL, "", [("forecast", {"place": "Rome", "scale": "C"})]),
    ("qwen3_coder", f"Of course!{XML_CALL}\n{XML_CALL}", "Of course!", [("forecast", {"place": "Rome", "scale": "C"})] * 2),
    (
        "qwen3_coder",
        "<tool_call>\n<function=record>\n<parameter=whole>\n4\n</parameter>\n<parameter=real>\n0.5\n</parameter>\n"
        "<parameter=flag>\ntrue\n</parameter>\n<parameter=text>\nhi there\n</parameter>\n"
        '<parameter=data>\n{"k": 1, \n "m": [2]}\n</parameter>\n</function>\n</tool_call>',
        "",
        [("record", {"whole": 4, "real": 0.5, "flag": True, "text": "hi there", "data": {"k": 1, "m": [2]}})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=record>\n<parameter=some_whole>\n5\n</parameter>\n<parameter=some_text>\nwords\n</parameter>\n"
        '<parameter=some_data>{"k": 42}</parameter>\n<parameter=nothing>\nnull\n</parameter>\n</function>\n</tool_call>',
        "",
        [("record", {"some_whole": 5, "some_text": "words", "some_data": {"k": 42}, "nothing": None})],
    ),
    (  # without <tool_call>, but with its end
        "qwen3_coder",
        "I look.\n\n<function=forecast>\n<parameter=place>\nRome\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        [("forecast", {"place": "Rome"})],
    ),
    (  # a value without its end
        "qwen3_coder",
        "<tool_call>\n<function=forecast>\n<parameter=place>\nRome\n<parameter=scale>\nC\n</parameter>\n</function>\n</tool_call>",
        "",
        [("forecast", {"place": "Rome", "scale": "C"})],
    ),
    (  # a tag without its end is content; the next call is read
        "qwen3_coder",
        f"<tool_call>\n<function=now\n</function>\n</tool_call>\n{XML_CALL}",
        "<tool_call>\n<function=now\n</function>\n</tool_call>",
        [("forecast", {"place": "Rome", "scale": "C"})],
    ),
    (  # in one line, as for qwen3_xml
        "qwen3_coder",
        'I look.\n\n<tool_call>\n<function=record>\n<parameter=text>C:\\tmp\\a "b"</parameter>\n</function>\n</tool_call><tool_call>\n'
        "<function=now>\n</function>\n</tool_call>\n\nThat is all.",
        "I look.\n\nThat is all.",
        [("record", {"text": 'C:\\tmp\\a "b"'}), ("now", {})],
    ),
    ("qwen3_coder", XML_CALL.replace("Rome", "Rome->Bari"), "", [("forecast", {"place": "Rome->Bari", "scale": "C"})]),
    ("qwen3_coder", "<tool_call><function=></function></tool_call>", "<tool_call><function=></function></tool_call>", []),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=forecast>\n<parameter=place>Rome, Italy</parameter>\n<parameter=scale>C</parameter>\n"
        "</function>\n</seed:tool_call>",
        "",
        [("forecast", {"place": "Rome, Italy", "scale": "C"})],
    ),
    (  # its template writes other values than strings as Python does
        "seed_oss",
        "<seed:tool_call>\n<function=record>\n<parameter=flag>True</parameter>\n<parameter=data>{'k': None}</parameter>\n"
        "</function>\n</seed:tool_call>",
        "",
        [("record", {"flag": True, "data": {"k": None}})],
    ),
    (
        "seed_oss",
        "<seed:think>\nI call it.</seed:think>\n<seed:tool_call>\n<function=record>\n<parameter=text>two\nlines\n</parameter>\n"
        "</function>\n</seed:tool_call>",
        "<seed:think>\nI call it.</seed:think>",
        [("record", {"text": "two\nlines\n"})],
    ),
]

GLM: list[Case] = [
    ("glm45", "<tool_call>now</tool_call>", "", [("now", {})]),
    ("glm45", "  \n <tool_call>now\n</tool_call>", "", [("now", {})]),
    (
        "glm45",
        "I look. <tool_call>forecast\n    <arg_key>place</arg_key>\n    <arg_value>Rome</arg_value>\n    <arg_key>scale</arg_key>\n"
        "    <arg_value>C</arg_value>\n    </tool_call>\n    <tool_call>now\n</tool_call>",
        "I look.",
        [("forecast", {"place": "Rome", "scale": "C"}), ("now", {})],
    ),
    (
        "glm45",
        "<tool_call>forecast<arg_key>place</arg_key><arg_value>Rome</arg_value></tool_call>" * 2,
        "",
        [("forecast", {"place": "Rome"})] * 2,
    ),
    (
        "glm45",
        "One.\n<tool_call>sum_up\n<arg_key>a</arg_key><arg_value>42</arg_value><arg_key>b</arg_key>\n<arg_value>0.5</arg_value>\n"
        "</tool_call>\nTwo.\n<tool_call>record\n<arg_key>text</arg_key>\n<arg_value>  code()  \n</arg_value>\n</tool_call>",
        "One.\nTwo.",
        [("sum_up", {"a": 42, "b": 0.5}), ("record", {"text": "  code()  \n"})],
    ),
    ("glm47", "<tool_call>now</tool_call>", "", [("now", {})]),
    ("glm47", "<tool_call>now\n</tool_call>", "", [("now", {})]),
    (
        "glm47",
        "I look.<tool_call>sum_up<arg_key>a</arg_key><arg_value>1</arg_value></tool_call><tool_call>forecast\n<arg_key>place</arg_key>\n"
        "<arg_value>Rome</arg_value>\n</tool_call>",
        "I look.",
        [("sum_up", {"a": 1}), ("forecast", {"place": "Rome"})],
    ),
    (  # vLLM's parser makes 42 of an argument that the schema does not have; here it is a string in all families
        "glm45",
        "<tool_call>now\n<arg_key>new</arg_key>\n<arg_value>42</arg_value>\n</tool_call>",
        "",
        [("now", {"new": "42"})],
    ),
    (
        "glm45",
        "<tool_call>record\n<arg_key>text</arg_key><arg_value>你好 🎉</arg_value></tool_call>",
        "",
        [("record", {"text": "你好 🎉"})],
    ),
    (  # GLM 4.6 escapes the quotes of some arrays
        "glm45",
        r"<tool_call>record<arg_key>items</arg_key><arg_value>[{\"id\": \"1\", \"k\": \"a\\nb\"}]</arg_value></tool_call>",
        "",
        [("record", {"items": [{"id": "1", "k": "a\nb"}]})],
    ),
    ("glm45", "<tool_call>   ", "<tool_call>   ", []),
    ("glm45", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    (
        "minimax_m2",
        'I look. <minimax:tool_call><invoke name="forecast"><parameter name="place">Rome</parameter>'
        '<parameter name="days">5</parameter></invoke></minimax:tool_call>',
        "I look.",
        [("forecast", {"place": "Rome", "days": "5"})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="record"><parameter name="text">\nTom &amp; <b>\n</parameter><parameter name="data">{"a":1,\n"b":2}'
        "</parameter></invoke></minimax:tool_call>",
        "",
        [("record", {"text": "\nTom &amp; <b>\n", "data": {"a": 1, "b": 2}})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="record">\n<parameter name="nothing">null</parameter>\n<parameter name="some_data">'
        '{"k": 1}</parameter>\n<parameter name="some_text">Ada</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [("record", {"nothing": None, "some_data": {"k": 1}, "some_text": "Ada"}), ("now", {})],
    ),
]

SECTION, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def kimi(name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{name} <|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


K_BEGIN, K_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
SECTIONS: list[Case] = [
    ("deepseek_v3", f"I look.{SECTION}{v3('forecast', ROME)}{END}", "I look.", [("forecast", {"place": "Rome"})]),
    ("deepseek_v3", f"{SECTION}{v3('record', TYPED)}\n{v3('now', '{}')}{END}", "", [("record", json.loads(TYPED)), ("now", {})]),
    ("deepseek_v3", f"{SECTION}{v3('record', ESCAPED)}{v3('now', '{}')}{END}", "", [("record", json.loads(ESCAPED)), ("now", {})]),
    ("deepseek_v3", f"{SECTION}{v3('sum_up', CUT)}{v3('now', '{}')}{END}", "", [("sum_up", '{"a": 1\n'), ("now", {})]),
    (
        "deepseek_v3",
        f"{SECTION}function<｜tool▁sep｜>now\n```json\n{{}}\n```{END}",
        f"{SECTION}function<｜tool▁sep｜>now\n```json\n{{}}\n```{END}",
        [],
    ),
    ("deepseek_v3", f"{SECTION}{v3('record', MARKED)}{END}", "", [("record", json.loads(MARKED))]),
    ("deepseek_v31", f"I look.{SECTION}{v31('sum_up', ONE)}{END}", "I look.", [("sum_up", {"a": 1})]),
    (  # vLLM drops text after the calls; here it is content
        "deepseek_v31",
        f"I look.{SECTION}{v31('sum_up', ONE)}{v31('now', '{}')}{END} That is all.",
        "I look. That is all.",
        [("sum_up", {"a": 1}), ("now", {})],
    ),
    ("deepseek_v31", f"I look.{SECTION}forecast", f"I look.{SECTION}forecast", []),
    ("deepseek_v31", f"{SECTION}now<｜tool▁sep｜>{{}}{END}", f"{SECTION}now<｜tool▁sep｜>{{}}{END}", []),
    (
        "kimi_k2",
        f"I look. {K_BEGIN}{kimi('functions.forecast:0', ROME)}{kimi('now:1', '{}')}{K_END}",
        "I look.",
        [("forecast", {"place": "Rome"}), ("now", {})],
    ),
    (
        "kimi_k2",
        f"{K_BEGIN} <|tool_call_begin|>\nfunctions.forecast:0 <|tool_call_argument_begin|> {ROME} <|tool_call_end|> <|tool_call_begin|>\n"
        f"functions.now:1 <|tool_call_argument_begin|> {{}} <|tool_call_end|> {K_END}",
        "",
        [("forecast", {"place": "Rome"}), ("now", {})],
    ),
    ("kimi_k2", f"{K_BEGIN}{kimi('functions.record:0', LINES)}{K_END}", "", [("record", {"text": "<div>"})]),
    ("kimi_k2", f"{K_BEGIN}{kimi('functions.store-it.v2:0', '{}')}{K_END}", "", [("store-it.v2", {})]),
    (
        "kimi_k2",
        f"{K_BEGIN}{kimi('functions.sum_up:0', CUT)}{kimi('functions.now:1', '{}')}{K_END}",
        "",
        [("sum_up", '{"a": 1'), ("now", {})],
    ),
    ("kimi_k2", f"{K_BEGIN}{kimi('api.tools.now:42', '{}')}{K_END}", "", [("now", {})]),
    ("kimi_k2", f"{K_BEGIN}{kimi('functions.record:0', MARKED)}{K_END}", "", [("record", json.loads(MARKED))]),
    (  # no name is content; the next call is read
        "kimi_k2",
        f"{K_BEGIN}{kimi('functions.none.0', '{}')}{kimi('functions.now:1', '{}')}{K_END}",
        f"{K_BEGIN}{kimi('functions.none.0', '{}')}",
        [("now", {})],
    ),
    ("kimi_k2", f"Hm. {K_BEGIN} noise {kimi('functions.now:0', '{}')}{K_END}", f"Hm. {K_BEGIN} noise", [("now", {})]),
    ("kimi_k2", f"{K_BEGIN}{K_END}", f"{K_BEGIN}{K_END}", []),
    (
        "kimi_k2",
        f'{K_BEGIN}<|tool_call_begin|>functions.forecast:0<|tool_call_argument_begin|>{{"place": "Ro',
        "",
        [("forecast", '{"place": "Ro')],
    ),
]

MISTRAL: list[Case] = [
    ("mistral", '[TOOL_CALLS][{"name": "sum_up", "arguments":{"a": 3.5, "b": 4}}]', "", [("sum_up", {"a": 3.5, "b": 4})]),
    ("mistral", '[TOOL_CALLS]  [ {"name":"sum_up" , "arguments" : {"a": 3} } ]', "", [("sum_up", {"a": 3})]),
    ("mistral", '[TOOL_CALLS] [{"arguments":{"name": "Ada"}, "name": "now", "id": "abcDEF123"}]', "", [("now", {"name": "Ada"})]),
    (
        "mistral",
        'Hello[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "record", "arguments": {"text": "[Name] - [x]"}}]\nmore',
        "Hello\nmore",
        [("now", {}), ("record", {"text": "[Name] - [x]"})],
    ),
    ("mistral", "[TOOL_CALLS] no JSON at all", "[TOOL_CALLS] no JSON at all", []),
    ("mistral_v11", '[TOOL_CALLS]sum_up{"a": 3.5}[TOOL_CALLS]now{}', "", [("sum_up", {"a": 3.5}), ("now", {})]),
    ("mistral_v11", f"hi{{hi[TOOL_CALLS]record{ESCAPED}", "hi{hi", [("record", json.loads(ESCAPED))]),
    (
        "mistral_v11",
        '[TOOL_CALLS]record{"text": "print(\\"x\\")\\nre(\'{}\')',
        "",
        [("record", '{"text": "print(\\"x\\")\\nre(\'{}\')')],
    ),
    ("mistral_v11", "[TOOL_CALLS]now", "[TOOL_CALLS]now", []),
]

TWO = ('{"name": "sum_up", "parameters": {"a": 1}}', '{"name": "now", "parameters": {}}')
TWO_CALLS: list[Call] = [("sum_up", {"a": 1}), ("now", {})]
LLAMA: list[Case] = [
    ("llama3", f'{{"name": "forecast", "parameters": {ROME}}}', "", [("forecast", {"place": "Rome"})]),
    ("llama3", f'{{"name": "record", "arguments": {ESCAPED}}}', "", [("record", json.loads(ESCAPED))]),
    ("llama3", f'<|python_tag|>{{"name": "forecast", "parameters": {ROME}}}', "", [("forecast", {"place": "Rome"})]),
    ("llama3", f'I look.<|python_tag|>{{"name":"forecast","arguments":{ROME}}}', "I look.", [("forecast", {"place": "Rome"})]),
    *[("llama3", f"{TWO[0]}{between}{TWO[1]}", "", TWO_CALLS) for between in ("; ", ";", " ; ", ";\n", "\n", "")],
    ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}' * 2, "", [("now", {})] * 2),
    ("llama3", '{"name": "now", "parameters": {}} I used {now} here.', " I used {now} here.", [("now", {})]),
    ("llama3", '{"name": "now", "parameters": {}} {"place": "Rome"} it is', ' {"place": "Rome"} it is', [("now", {})]),
    ("llama3", '{"parameters": {}}', '{"parameters": {}}', []),
    ("llama3", '{"name": "now"}', '{"name": "now"}', []),
    # vLLM reads calls behind other text as well. No template has them, and content may quote calls.
    ("llama3", 'So: {"name": "now", "parameters": {}}', 'So: {"name": "now", "parameters": {}}', []),
    ("phi4_mini_json", f'functools[{{"name": "record", "arguments": {TYPED}}}]', "", [("record", json.loads(TYPED))]),
    (
        "phi4_mini_json",
        f'I look.\nfunctools[\n  {{"name": "forecast", "arguments": {ROME}}},\n  {{"name": "now", "arguments": {{}}}}\n]\nIs it good?',
        "I look.\nIs it good?",
        [("forecast", {"place": "Rome"}), ("now", {})],
    ),
    ("phi4_mini_json", 'functools{"name": "now"}', 'functools{"name": "now"}', []),
    ("phi4_mini_json", "functools[] only text", "functools[] only text", []),
    ("phi4_mini_json", "functools[ only text ]", "functools[ only text ]", []),
    ("granite", f'<|tool_call|> [{{"name": "record", "arguments": {ESCAPED}}}]', "", [("record", json.loads(ESCAPED))]),
    (
        "granite",
        f'I look.\n<tool_call> [\n    {{"arguments": {ROME}, "name": "forecast"}}, {{"name": "now", "arguments": {{}}}}]\nThat is all.',
        "I look.\nThat is all.",
        [("forecast", {"place": "Rome"}), ("now", {})],
    ),
    ("granite", '<|tool_call|> {"name": "now", "arguments": {}}', '<|tool_call|> {"name": "now", "arguments": {}}', []),
    ("granite", 'A text [{"name": "now"}]', 'A text [{"name": "now"}]', []),
]

MORE = "record(text='Ada', whole=37, data={'place': 'Rome'}, nothing=None, flag=True, items=['a', 'b'])"
MORE_CALL: Call = (
    "record",
    {"text": "Ada", "whole": 37, "data": {"place": "Rome"}, "nothing": None, "flag": True, "items": ["a", "b"]},
)
ROME_CALL: Call = ("forecast", {"place": "Rome", "scale": "C"})
PYTHON_CALLS: list[tuple[str, list[Call]]] = [
    ("forecast(place='Rome', scale='C')", [ROME_CALL]),
    (MORE, [MORE_CALL]),
    ("now()", [("now", {})]),
    ("record(data={}), record(items=[])", [("record", {"data": {}}), ("record", {"items": []})]),
    (r"record(text='Ada\'s \"big\" house')", [("record", {"text": 'Ada\'s "big" house'})]),
    (f"forecast(place='Rome',scale='C'),now(),{MORE}", [ROME_CALL, ("now", {}), MORE_CALL]),
]
PYTHON: list[Case] = [
    *[("pythonic", f"[{text}]", "", calls) for text, calls in PYTHON_CALLS],
    *[("llama4_pythonic", f"[{text}]", "", calls) for text, calls in PYTHON_CALLS],
    ("pythonic", "How can I help?", "How can I help?", []),
    ("pythonic", "[forecast(place='Rome', scale='C')] So it is:", " So it is:", [ROME_CALL]),
    ("llama4_pythonic", "<|python_start|>[forecast(place='Rome', scale='C')]<|python_end|>", "", [ROME_CALL]),
    ("llama4_pythonic", "<|python_start|>[forecast(place='Rome', scale='C'), now()]", "", [ROME_CALL, ("now", {})]),
    (
        "llama4_pythonic",
        "I look. <|python_start|>[forecast(place='Rome', scale='C')]<|python_end|> In this way.",
        "I look. In this way.",
        [ROME_CALL],
    ),
    ("gemma3", "```tool_code\nforecast(place='Rome', scale='C')\n```", "", [ROME_CALL]),
]

Q = '<|"|>'


def gemma(text: str) -> str:
    return text.replace("'", Q)


GEMMA: list[Case] = [
    (
        "gemma4",
        gemma("Look. <|tool_call>call:forecast{place:'Rome, Italy',scale:'C'}<tool_call|>"),
        "Look.",
        [("forecast", {"place": "Rome, Italy", "scale": "C"})],
    ),
    (
        "gemma4",
        gemma(
            "<|tool_call>call:record{text:'a',whole:42,flag:true,real:0.5,nothing:null}<tool_call|><|tool_call>call:now{}<tool_call|>"
        ),
        "",
        [("record", {"text": "a", "whole": 42, "flag": True, "real": 0.5, "nothing": None}), ("now", {})],
    ),
    (
        "gemma4",
        gemma("<|tool_call>call:record{data:{in:'x','3':{'4':'y'}},items:['a]b',['c'],4,true,0.5]}<tool_call|>"),
        "",
        [("record", {"data": {"in": "x", "3": {"4": "y"}}, "items": ["a]b", ["c"], 4, True, 0.5]})],
    ),
    (
        "gemma4",
        gemma("<|tool_call>call:store-it.v2{text:'<html>\n<head>'}<tool_call|><div>"),
        "<div>",
        [("store-it.v2", {"text": "<html>\n<head>"})],
    ),
    ("gemma4", "<|tool_call>call:record{text:,whole:}<tool_call|>", "", [("record", {"text": "", "whole": ""})]),
    ("gemma4", "<|tool_call>call:record{real:108.,data:{in:}}<tool_call|>", "", [("record", {"real": 108.0, "data": {"in": ""}})]),
    (  # the second argument is without its comma
        "functiongemma",
        "Look. <start_function_call>call:record{text:<escape>Hi you<escape>whole:<escape>10<escape>,flag:<escape>true<escape>}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
        "Look.",
        [("record", {"text": "Hi you", "whole": 10, "flag": True}), ("now", {})],
    ),
]

COMMENT = "<|start|>assistant<|channel|>commentary to=functions."
HARMONY: list[Case] = [
    ("openai", "<|channel|>final<|message|>Hello<|return|>", "Hello", []),
    (
        "openai",
        f'<|channel|>analysis<|message|>I think.<|end|>{COMMENT}forecast <|constrain|>json<|message|>{{\n"place": "Rome"\n}}<|call|>',
        "",
        [("forecast", {"place": "Rome"})],
    ),
    (
        "openai",
        f"<|channel|>commentary to=functions.forecast <|constrain|>json<|message|>{ROME}<|call|>{COMMENT}sum_up<|message|>{{}}<|call|>"
        f"{COMMENT}now <|constrain|>json<|message|><|call|><|start|>assistant<|channel|>final<|message|>I call.<|return|>",
        "I call.",
        [("forecast", {"place": "Rome"}), ("sum_up", {}), ("now", {})],
    ),
    (  # vLLM passes a text that is no JSON on as the arguments. The API has objects only.
        "openai",
        "<|channel|>commentary to=functions.now<|message|>foo<|call|>",
        "<|channel|>commentary to=functions.now<|message|>foo",
        [],
    ),
]

CASES = [*HERMES, *QWEN, *GLM, *SECTIONS, *MISTRAL, *LLAMA, *PYTHON, *GEMMA, *HARMONY]
