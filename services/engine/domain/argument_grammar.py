"""Write the grammar of a tool's arguments in the notation of the model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequest
from shared.tool_calls.argument_types import is_json_of, is_text, json_type, resolve, types_of
from shared.tool_calls.family import BareArguments, JsonArguments, PythonArguments, TaggedArguments

_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,12}"
"""White space between tokens of arguments. Bounded, as in other JSON (docs/adr/0073)."""
_MAX_DEPTH = 16
_COMPOSED = (
    "$ref", "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentRequired", "dependentSchemas", "minProperties",
    "maxProperties", "propertyNames",
)  # fmt: skip
"""Keywords of an object's schema that no list of its properties can enforce."""
_LENGTHS = ("minLength", "maxLength")
_NOT_COUNTED = ("pattern", "format", "$ref", "anyOf", "oneOf", "allOf", "not", "if", "const", "enum")
"""Keywords of a string's schema that the number of its characters does not express."""
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
_ANY_KEY = r"""/[^<>"=(){}\[\]:,\s]+/"""
_MAX_STEPS = 64
"""Most references and choices of one argument that are followed."""


def json_rule(schema: Mapping[str, Any], *, is_compact: bool = False) -> str:
    """Write JSON of a schema."""
    options: dict[str, Any] = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": _WHITE_SPACE}
    return "%json " + json.dumps({"x-guidance": options} | dict(schema))


@dataclass(frozen=True)
class MarkedText:
    """Writes texts whose markers may be special tokens.

    Attributes:
        special: Token ids of the markers that are special tokens, by marker.
    """

    special: Mapping[str, int]

    def write(self, text: str) -> str:
        """Write a fixed text."""
        if not text:
            return '""'
        marks = sorted(self.special, key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
        return " ".join(f"<[{self.special[p]}]>" if p in self.special else json.dumps(p, ensure_ascii=False) for p in parts if p)

    def write_until(self, name: str, end: str, without: Sequence[str], chars: str = "*") -> tuple[str, list[str]]:
        """Write any text up to the first `end`, which it includes.

        Args:
            name: Of the terminal, in capitals.
            end: A marker.
            without: Further texts that it does not have.
            chars: The number of its characters, as in a regular expression.

        Returns:
            An expression, and the rules that it needs.
        """
        first = next((mark for mark in self.special if end.startswith(mark)), None)
        unwanted = [*without, *([] if first else [end.strip()])]
        lacks = "|".join(_regex(text) for text in unwanted)
        text = rf"/(.|\n){chars}/" + (rf" & ~/(.|\n)*({lacks})(.|\n)*/" if lacks else "")
        if first is not None:
            return f"{name} {self.write(end)}", [f"{name}: {text}"]
        rule = name.lower() + "_end"
        return rule, [f"{name}: {text}", f"{rule}[lazy]: {name} {json.dumps(end, ensure_ascii=False)}"]


Notation = JsonArguments | TaggedArguments | PythonArguments | BareArguments


def write_arguments(rule: str, notation: Notation, schema: Mapping[str, Any], text: MarkedText, tool: str) -> list[str]:
    """Write the rules of a tool's arguments.

    Raises:
        InvalidRequest: No rules in this notation enforce the schema.
    """
    match notation:
        case JsonArguments():
            return [f"{rule}: {json_rule(schema)}"]
        case TaggedArguments() as tags:
            return _Tagged(tags, text, schema, tool).rules(rule)
        case PythonArguments():
            return _python_rules(rule, schema, tool)
        case BareArguments(quote=quote):
            return _Bare(quote, text, tool).rules(rule, schema, _MAX_DEPTH)


def write_any_arguments(rule: str, notation: Notation, text: MarkedText) -> list[str]:
    """Write the rules of arguments that are held to no schema, but to the notation."""
    key = f"{rule}_KEY".upper()
    match notation:
        case JsonArguments():
            return [f"{rule}: {json_rule({'type': 'object'})}"]
        case TaggedArguments() as tags:
            value, rules = _Tagged(tags, text, {}, "").any_value(f"{rule}_value")
            item = f"{text.write(tags.key_begin)} {key} {text.write(tags.key_end + tags.value_begin)} {value}"
            return [f"{rule}: {rule}_item* {text.write(tags.end)}", f"{rule}_item: {item}", f"{key}: {_ANY_KEY}", *rules]
        case PythonArguments():
            return [
                f'{rule}: ({rule}_item (", " {rule}_item)*)? ")"',
                f'{rule}_item: {key} "=" {rule}_value',
                f'{rule}_value: {rule}_json | {rule}_text | "True" | "False" | "None" | {rule}_list | {rule}_dict',
                f'{rule}_list: "[" ({rule}_value (", " {rule}_value)*)? "]"',
                f'{rule}_dict: "{{" ({rule}_pair (", " {rule}_pair)*)? "}}"',
                f'{rule}_pair: {rule}_text ": " {rule}_value',
                f"{rule}_text: {rule.upper()}_QUOTED",
                f"{rule}_json: {json_rule({})}",
                f"{key}: /[A-Za-z_][A-Za-z0-9_]*/",
                _write_quoted(rule, "*"),
            ]
        case BareArguments(quote=quote):
            end, rules = text.write_until(f"{rule}_text".upper(), quote, ())
            values = f'{text.write(quote)} {end} | {rule}_json | {rule} | "[" ({rule}_value ("," {rule}_value)*)? "]"'
            return [
                f'{rule}: "{{" ({rule}_item ("," {rule}_item)*)? "}}"',
                f'{rule}_item: {key} ":" {rule}_value',
                f"{rule}_value: {values}",
                f"{rule}_json: {json_rule({'type': ['number', 'boolean', 'null']})}",
                f"{key}: {_ANY_KEY}",
                *rules,
            ]


def _properties(schema: Mapping[str, Any], tool: str) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return the properties of an object: name, schema, and whether it is required."""
    found = schema.get("properties") or {}
    required = schema.get("required") or []
    if (keyword := next((key for key in _COMPOSED if key in schema), None)) is not None:
        raise _refuse(tool, keyword)
    if not isinstance(found, Mapping) or not isinstance(required, list) or any(name not in found for name in required):
        raise _refuse(tool, "required")
    properties = []
    for name, each in found.items():
        if not isinstance(each, Mapping | bool) or re.search(r'[<>"=(){}\[\]:,\s]', name) or not name:
            raise _refuse(tool, f"properties.{name[:40]}")
        properties.append((name, each if isinstance(each, Mapping) else {}, name in required))
    return properties


def _refuse(tool: str, keyword: str) -> InvalidRequest:
    return InvalidRequest(
        f"The parameters of {tool} have {keyword}, which cannot be enforced in the notation of this model's calls. Use a plain object, "
        "or tool_choice auto without strict",
        param="tools",
    )


def _add_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema with the definitions that it may refer to."""
    if '"$ref"' not in json.dumps(schema):
        return dict(schema)
    return {key: root[key] for key in ("$defs", "definitions") if key in root} | dict(schema)


def _chain(rule: str, items: Sequence[tuple[str, bool]], separator: str) -> list[str]:
    """Write the rules of a sequence in which some items may be missing.

    Args:
        rule: Name of the first rule.
        items: Expressions, and whether each is required.
        separator: The text between two.
    """
    rules = []
    for k, (item, is_required) in enumerate(items):
        after = f"{rule}_m{k + 1}"
        for name, begin in ((f"{rule}_f{k}", ""), (f"{rule}_m{k}", json.dumps(separator) + " ")):
            skip = "" if is_required else " | " + (f"{rule}_f{k + 1}" if not begin else after)
            rules.append(f"{name}: {begin}{item} {after}{skip}")
    last = len(items)
    rules += [f'{rule}_f{last}: ""', f'{rule}_m{last}: ""']
    return rules


def _string_chars(schema: Mapping[str, Any], tool: str) -> str:
    """Return the number of characters of a string, as in a regular expression."""
    if (keyword := next((key for key in _NOT_COUNTED if key in schema), None)) is not None:
        raise _refuse(tool, keyword)
    low, high = (schema.get(key) for key in _LENGTHS)
    if low is None and high is None:
        return "*"
    return f"{{{int(low or 0)},{'' if high is None else int(high)}}}"


def _texts(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the strings of an enumeration; None if it is none of strings."""
    values = _values(schema)
    return values if values and all(isinstance(value, str) for value in values) else None


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values of an enumeration that are of the schema's type; None: it is none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    kinds = schema.get("type")
    return values if kinds is None else [value for value in values if _is_of(value, kinds if isinstance(kinds, list) else [kinds])]


def _is_of(value: object, kinds: Sequence[object]) -> bool:
    """Return whether a value is of one of these types. 1.0 is an integer (JSON Schema, 6.1.1)."""
    kind = json_type(value)
    is_whole = kind == "integer" or (isinstance(value, float) and value.is_integer())
    return kind in kinds or (is_whole and "integer" in kinds) or (kind == "integer" and "number" in kinds)


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return schemas of which a value has to comply with one.

    References are followed, and choices and lists of types are divided. A schema that demands more
    besides them is left whole, and so is one with too many.
    """
    found, left = list[Mapping[str, Any]](), list[Any]([schema])
    for _ in range(_MAX_STEPS):
        if not left:
            return found
        each = left.pop()
        demands = each.keys() - _ANNOTATIONS if isinstance(each, Mapping) else frozenset()
        if demands == {"$ref"} and isinstance(target := resolve(str(each["$ref"]), root), Mapping):
            left.append(target)
        elif demands in ({"anyOf"}, {"oneOf"}) and isinstance(choices := each[next(iter(demands))], list) and choices:
            left += reversed(choices)
        elif isinstance(each, Mapping) and isinstance(kinds := each.get("type"), list) and kinds:
            found += [dict(each) | {"type": kind} for kind in kinds]
        else:
            found.append(each if isinstance(each, Mapping) else {})
    return [schema]


@dataclass(frozen=True)
class _Tagged:
    """Arguments between tags, in the order of the schema."""

    style: TaggedArguments
    text: MarkedText
    root: Mapping[str, Any]
    tool: str

    def rules(self, rule: str) -> list[str]:
        items, rules = [], list[str]()
        for k, (name, schema, is_required) in enumerate(_properties(self.root, self.tool)):
            begin = self.text.write(f"{self.style.key_begin}{name}{self.style.key_end}{self.style.value_begin}")
            item = f"{rule}_i{k}"
            value, more = self._value(f"{rule}_{k}", name, schema)
            rules += [f"{item}: {begin} {value}", *more]
            items.append((item, is_required))
        return [f"{rule}: {rule}_f0 {self.text.write(self.style.end)}", *_chain(rule, items, ""), *rules]

    def _value(self, rule: str, name: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return the expression of a value with its end, and the rules that it needs.

        The reader of the arguments takes the text of a string as it is, and JSON where other types
        are allowed too (`argument_types`).

        1. A text of any length or of a limited one.
        2. Texts of an enumeration.
        3. JSON, also for strings where the reader takes JSON.
        """
        types = types_of(self.root, name)
        choices = _alternatives(schema, self.root)
        free = [each for each in choices if _is_string(each, types)]
        any_text = next((each for each in free if not {*_LENGTHS, *_NOT_COUNTED} & each.keys()), None)
        if any_text is not None:
            return self._free_text(rule, any_text)
        if free and is_text(types):  # 1
            if len(choices) > 1:
                raise _refuse(self.tool, f"properties.{name[:40]}")
            return self._free_text(rule, free[0])
        parts, others = list[str](), list[Mapping[str, Any]]()
        for each in choices:
            values = _values(each)
            if values is not None and (is_text(types) or not each.keys() - _ANNOTATIONS - {"type", "enum", "const"}):  # 2
                parts += [self._write_value(value, types) for value in values]
            else:
                others.append(each)
        rules = list[str]()
        if others:  # 3
            rest = schema if len(others) == len(choices) else {"anyOf": others}
            rules.append(f"{rule}_json: {json_rule(_add_definitions(rest, self.root))}")
            parts.append(f"{rule}_json")
        if not parts:
            raise _refuse(self.tool, f"properties.{name[:40]}")
        return f"({' | '.join(dict.fromkeys(parts))}) {self.text.write(self.style.value_end)}", rules

    def _write_value(self, value: object, types: frozenset[str]) -> str:
        """Write a value of an enumeration so that the reader finds it."""
        is_plain = isinstance(value, str) and (is_text(types) or not is_json_of(value.strip(), types))
        return self.text.write(str(value) if is_plain else json.dumps(value, ensure_ascii=False))

    def any_value(self, rule: str) -> tuple[str, list[str]]:
        """Return the expression of any value with its end, and the rules that it needs."""
        return self._free_text(rule, {})

    def _free_text(self, rule: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        style = self.style
        end = style.value_end.rstrip()
        others = (style.key_begin, style.end) if style.is_end_optional else ()
        chars = _string_chars(schema, self.tool)
        expression, rules = self.text.write_until(f"{rule}_text".upper(), end, others, chars)
        return f"{expression} {self.text.write(style.value_end[len(end) :])}", rules


def _is_string(schema: Mapping[str, Any], types: frozenset[str]) -> bool:
    """True if the schema allows texts that it does not list."""
    if _values(schema) is not None:
        return False
    return schema.get("type") == "string" or (is_text(types) and "type" not in schema)


def _python_rules(rule: str, schema: Mapping[str, Any], tool: str) -> list[str]:
    items, rules = [], list[str]()
    for k, (name, each, is_required) in enumerate(_properties(schema, tool)):
        if not name.isidentifier():
            raise _refuse(tool, f"properties.{name[:40]}")
        rules += _python_value(f"{rule}_{k}", each, schema)
        items.append((f"{json.dumps(name + '=')} {rule}_{k}", is_required))
    return [f'{rule}: {rule}_f0 ")"', *_chain(rule, items, ", "), *rules]


def _python_value(rule: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
    """Write the rules of a literal of Python, with JSON inside of lists and dictionaries."""
    if (texts := _texts(schema)) is not None:
        return [
            f"{rule}: {' | '.join(json.dumps(each, ensure_ascii=False) for text in texts for each in (json.dumps(text), repr(text)))}"
        ]
    if schema.get("type") == "boolean" and _values(schema) is None:
        return [f'{rule}: "True" | "False"']
    rules = [f"{rule}_json: {json_rule(_add_definitions(schema, root))}"]
    if schema.get("type") == "string" and not set(_NOT_COUNTED) & schema.keys():
        return [f"{rule}: {rule}_json | {rule.upper()}_QUOTED", _write_quoted(rule, _string_chars(schema, "")), *rules]
    return [f"{rule}: {rule}_json" + (' | "None"' if _has_null(schema) else ""), *rules]


def _write_quoted(rule: str, chars: str) -> str:
    """Write the rule of a string of Python in single quotes with this number of characters."""
    return rf"{rule.upper()}_QUOTED: /'([^'\\\n\r]|\\['\\nrt]){chars}'/"


def _has_null(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    choices = schema.get("anyOf") or schema.get("oneOf") or ()
    return (
        kinds == "null"
        or (isinstance(kinds, list) and "null" in kinds)
        or any(_has_null(c) for c in choices if isinstance(c, Mapping))
    )


@dataclass(frozen=True)
class _Bare:
    """Objects with bare keys, whose strings have a quote of their own."""

    quote: str
    text: MarkedText
    tool: str

    def rules(self, rule: str, schema: Mapping[str, Any], depth: int) -> list[str]:
        """Write the rules of an object."""
        items, rules = [], list[str]()
        for k, (name, each, is_required) in enumerate(_properties(schema, self.tool)):
            rules += self._value(f"{rule}_{k}", each, depth - 1)
            items.append((f"{json.dumps(name + ':', ensure_ascii=False)} {rule}_{k}", is_required))
        return [f'{rule}: "{{" {rule}_f0 "}}"', *_chain(rule, items, ","), *rules]

    def _value(self, rule: str, schema: Mapping[str, Any], depth: int) -> list[str]:
        quote = self.text.write(self.quote)
        if depth == 0:
            raise _refuse(self.tool, "too many nested objects")
        if (texts := _texts(schema)) is not None:
            return [f"{rule}: {quote} ({' | '.join(map(self.text.write, texts))}) {quote}"]
        match schema.get("type"):
            case list() as kinds if kinds:
                schemas = [each for kind in kinds if _values(each := dict(schema) | {"type": kind}) != []]
                if not schemas:
                    raise _refuse(self.tool, "an enumeration without a value of its type")
                return self._choice(rule, schemas, depth)
            case "string":
                expression, rules = self.text.write_until(f"{rule}_text".upper(), self.quote, (), _string_chars(schema, self.tool))
                return [f"{rule}: {quote} {expression}", *rules]
            case "integer" | "number" | "boolean" | "null":
                return [f"{rule}: {json_rule(schema)}"]
            case "object":
                return self.rules(rule, schema, depth)
            case "array" if isinstance(items := schema.get("items"), Mapping):
                low, high = int(schema.get("minItems") or 0), schema.get("maxItems")
                more = f"{{{max(0, low - 1)},{'' if high is None else max(0, int(high) - 1)}}}"
                some = f'{rule}_e ("," {rule}_e){more}' if high != 0 else '""'
                return [f'{rule}: "[" {f"({some})?" if low == 0 else some} "]"', *self._value(f"{rule}_e", items, depth - 1)]
            case _ if isinstance(choices := schema.get("anyOf") or schema.get("oneOf"), list) and choices:
                return self._choice(rule, [_object(each, self.tool) for each in choices], depth)
        raise _refuse(self.tool, "a value without a type")

    def _choice(self, rule: str, schemas: Sequence[Mapping[str, Any]], depth: int) -> list[str]:
        names = [f"{rule}_o{k}" for k in range(len(schemas))]
        parts = [self._value(name, each, depth - 1) for name, each in zip(names, schemas, strict=True)]
        return [f"{rule}: {' | '.join(names)}", *(line for part in parts for line in part)]


def _object(schema: object, tool: str) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        raise _refuse(tool, "anyOf")
    return schema


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace(r"\<", "<").replace(r"\>", ">").replace('\\"', '"').replace(r"\=", "=")
