"""Check that names and prose use the field's terms: `python docs/check_words.py` (part of
`make lint`).

Reads the tracked *.py and *.md files. In Python it checks docstrings, comments, string constants of
more than one word, and the names that a file defines; uses of a name are not counted again.
docs/words.toml lists the words, the exceptions with their reasons, and the number of findings that
each folder may still have. That number can only fall: `--lower` writes the present counts where
they are smaller.

It also finds functions that are named by a bare participle or adjective (see `function_names`), and
checks the form of error messages (see `message_faults`) and of the names of tests (see
`test_name_faults`).
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_CODE = re.compile(r"`[^`]*`")
_FUNCTION_NAME = "function name"
_PRODUCT = ("compose/", "services/", "shared/", "simulator/", "thaw/", "weights/")


@dataclass(frozen=True)
class Finding:
    """A word outside the field's usage, at a line of a file."""

    path: str
    line: int
    word: str
    text: str


@dataclass(frozen=True)
class Allowed:
    """An exception: a word in the files that match `path`, if the text contains `text`."""

    word: str
    path: str
    text: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        return (
            self.word in ("*", finding.word)
            and fnmatch.fnmatch(finding.path, self.path)
            and self.text.lower() in finding.text.lower()
        )


@dataclass(frozen=True)
class Rules:
    """The contents of docs/words.toml."""

    words: Mapping[str, str]
    allowed: Sequence[Allowed]
    ceilings: Mapping[str, int]
    test_subjects: Sequence[str] = ()
    states: Sequence[str] = ()
    verbs: Sequence[str] = ()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Rules:
        """Build the rules from parsed TOML.

        Raises:
            ValueError: An exception has no reason.
        """
        allowed = []
        for entry in data.get("exceptions", []):
            if not entry.get("reason"):
                raise ValueError(f"The exception {entry} has no reason. Add one that a reviewer can judge.")
            allowed.append(Allowed(entry.get("word", "*"), entry.get("path", "*"), entry.get("text", ""), entry["reason"]))
        functions = data.get("function_names", {})
        return cls(
            data["words"],
            allowed,
            data.get("ceilings", {}),
            data.get("test_names", {}).get("subjects", ()),
            functions.get("states", ()),
            functions.get("verbs", ()),
        )

    @property
    def pattern(self) -> re.Pattern[str]:
        """Match one of the words, whole, in lower-case text."""
        words = sorted(self.words, key=len, reverse=True)
        return re.compile(r"(?<![a-z])(?:" + "|".join(word.replace(" ", r"\s+") for word in words) + r")(?![a-z])")


def _split_words(name: str) -> str:
    """Split an identifier into lower-case words: `HeardAt` and `heard_at` become "heard at"."""
    return _HUMP.sub(" ", name).replace("_", " ").lower()


def _names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str(name)):
                yield getattr(node, "lineno", 1), name
            case _:
                pass


def _strings(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def check_python(path: str, source: str, pattern: re.Pattern[str]) -> list[Finding]:
    """Find the words in the names, strings and comments of a Python file."""
    if not pattern.search(_split_words(source)):
        return []
    nodes = list(ast.walk(ast.parse(source)))
    found = [
        Finding(path, line, match.group(), name)
        for line, name in sorted(set(_names(nodes)))
        for match in pattern.finditer(_split_words(name))
    ]
    prose = list(_strings(nodes))
    if any("#" in line and pattern.search(line.lower()) for line in source.splitlines()):
        prose += _comments(source)
    found += [
        Finding(path, line, " ".join(m.group().split()), text.strip())
        for line, text in prose
        for m in pattern.finditer(text.lower())
    ]
    return found


def function_names(path: str, source: str, states: Sequence[str], verbs: Sequence[str]) -> list[Finding]:
    """Find functions whose whole name is a participle, an adjective or a preposition: `_answered`.

    A function is named by the verb of what it does. Properties may state something, as attributes
    do, and context managers what holds meanwhile. Tests are not checked.

    Args:
        path: The file, for the findings.
        source: The text of the file.
        states: Words that are such a name, beside those that end in "ed".
        verbs: Verbs that end in "ed".
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = node.name.strip("_")
        decorators = [ast.unparse(d) for d in node.decorator_list]
        may_state = any(d.endswith(("property", "contextmanager", ".setter")) for d in decorators)
        is_state = name in states or (name.endswith("ed") and "_" not in name and name not in verbs)
        if is_state and not may_state and not node.name.startswith("__"):
            found.append(Finding(path, node.lineno, _FUNCTION_NAME, node.name))
    return found


def check_markdown(path: str, source: str, pattern: re.Pattern[str]) -> list[Finding]:
    """Find the words in the prose of a Markdown file; code blocks and `code` are left out."""
    found = []
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            prose = _CODE.sub("", line).lower()
            found += [Finding(path, number, match.group(), line.strip()) for match in pattern.finditer(prose)]
    return found


_LOWER_CASE_WORD = re.compile(r"[a-z]+(?:'s)?[ ,:;]")
_LOWER_CASE_NAMES = ("thaw", "torch", "transformers")
_OPENAI_MESSAGES = ("Missing required parameter: ", "Invalid value for ", "This model's maximum context length is ")
"""Beginnings of messages that have OpenAI's text, period included, because clients match it."""


def error_classes(source: str) -> frozenset[str]:
    """Return the names of the classes that a module, shared/errors.py, defines."""
    return frozenset(node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef))


def _message_texts(node: ast.expr) -> Iterator[str]:
    """Yield the literal texts that an argument can have, with `{}` for each value."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in values)
        case ast.IfExp(body=body, orelse=orelse):
            yield from _message_texts(body)
            yield from _message_texts(orelse)
        case _:
            pass


def message_faults(path: str, source: str, errors: frozenset[str]) -> list[str]:
    """Find error messages of another form than the project's.

    A message is in sentence case, says what happened to what, then what to do, and asks without
    "please". Errors on the wire have no final period, because clients embed the message in a
    sentence of theirs; the two sentences of a `CommandError` are printed as they are, and end with
    one.

    Args:
        path: The file, for the findings.
        source: The text of the file.
        errors: Names of the classes of errors that cross the wire.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *more]) if name in errors:
                texts = [(text, False) for text in _message_texts(first)]
            case ast.Call(func=ast.Name(id="CommandError"), args=[first, *more]):
                texts = [(text, True) for argument in (first, *more) for text in _message_texts(argument)]
            case _:
                continue
        for text, is_printed in texts:
            word = _LOWER_CASE_WORD.match(text)
            if word is not None and word.group()[:-1] not in _LOWER_CASE_NAMES:
                found.append(f"{path}:{node.lineno}: begin the message with a capital letter: {text[:100]}")
            if re.search(r"\bplease\b", text, re.IGNORECASE):
                found.append(f'{path}:{node.lineno}: leave "please" out of the message: {text[:100]}')
            if re.search(r"\w\W*\.$", text) and not is_printed and not text.startswith(_OPENAI_MESSAGES):
                found.append(f"{path}:{node.lineno}: end the message without a period: {text[:100]}")
            if is_printed and text and not text.endswith((".", "?", "}", "`")):
                found.append(f"{path}:{node.lineno}: end the sentence with a period: {text[:100]}")
    return found


def _check_messages(tracked: Sequence[str]) -> list[str]:
    """Check the error messages of the product; tests and benchmarks raise errors of their own."""
    tree = _ROOT / "shared/errors.py"
    errors = error_classes(tree.read_text()) if tree.is_file() else frozenset()
    paths = [p for p in tracked if p.endswith(".py") and p.startswith(_PRODUCT) and (_ROOT / p).is_file()]
    return [fault for path in paths for fault in message_faults(path, (_ROOT / path).read_text(), errors)]


_TEST_NAME = re.compile(r"^ *(?:async )?def (test_(?:\d+_)?(\w+))", re.MULTILINE)
_TEST_NAME_LIMIT = 85


def test_name_faults(path: str, source: str, subjects: Sequence[str]) -> list[str]:
    """Find test functions whose names do not begin with their subject, or are too long.

    A name states the subject and the expected behaviour: `request_over_size_limit_returns_413`.

    Args:
        path: The file, for the findings.
        source: The text of the file.
        subjects: First words that name nothing, such as "what" and "it".
    """
    found = []
    for match in _TEST_NAME.finditer(source):
        name, stated = match.groups()
        if stated.split("_")[0] in subjects and not stated.startswith("what_if_"):
            found.append(f"{path}: {name}: begin the name with the subject of the test")
        if len(name) > _TEST_NAME_LIMIT:
            found.append(f"{path}: {name}: shorten the name to {_TEST_NAME_LIMIT} characters")
    return found


def _check_test_names(tracked: Sequence[str], subjects: Sequence[str]) -> list[str]:
    paths = [p for p in tracked if p.startswith("tests/") and p.endswith(".py") and (_ROOT / p).is_file()]
    return [fault for path in paths for fault in test_name_faults(path, (_ROOT / path).read_text(), subjects)]


def check(path: str, source: str, pattern: re.Pattern[str]) -> list[Finding]:
    """Find the words in a file, and in its name."""
    checker = check_python if path.endswith(".py") else check_markdown
    name = [Finding(path, 1, match.group(), path) for match in pattern.finditer(_split_words(Path(path).stem))]
    return name + checker(path, source, pattern)


def folder(path: str) -> str:
    """Name the folder whose ceiling counts `path`: a service, a kind of tests, or a top-level
    folder.
    """
    parts = path.split("/")
    if len(parts) == 1:
        return "."
    return "/".join(parts[:2]) if parts[0] in ("services", "tests") and len(parts) > 2 else parts[0]


def verdict(findings: Sequence[Finding], rules: Rules) -> tuple[Counter[str], list[str], list[str]]:
    """Compare the findings with the exceptions and the ceilings.

    Returns:
        The findings per folder; what fails the check; what can be lowered.
    """
    used = set()
    counted: dict[str, list[Finding]] = {}
    for finding in findings:
        exceptions = [number for number, allowed in enumerate(rules.allowed) if allowed.covers(finding)]
        used.update(exceptions)
        if not exceptions:
            counted.setdefault(folder(finding.path), []).append(finding)
    failures = [
        f"docs/words.toml: no text needs the exception {a}: remove it" for n, a in enumerate(rules.allowed) if n not in used
    ]
    slack = []
    for name in sorted(counted.keys() | rules.ceilings.keys()):
        found, ceiling = counted.get(name, []), rules.ceilings.get(name, 0)
        if len(found) > ceiling:
            verb = "a verb that says what the function does"
            failures += [f'{f.path}:{f.line}: "{f.word}": use {rules.words.get(f.word, verb)}: {f.text[:100]}' for f in found]
            failures.append(
                f"{name}: {len(found)} words of docs/words.toml, {ceiling} allowed. Use the field's term, or explain an exception."
            )
        elif len(found) < ceiling:
            slack.append(f"{name}: the ceiling in docs/words.toml can be lowered from {ceiling} to {len(found)}: run with --lower")
    return Counter({name: len(found) for name, found in counted.items()}), failures, slack


def lower_ceilings(text: str, counts: Mapping[str, int]) -> str:
    """Rewrite the `[ceilings]` of docs/words.toml: no number rises, and folders without findings
    go.
    """

    def line(match: re.Match[str]) -> str:
        number = min(int(match[2]), counts.get(match[1], 0))
        return f'"{match[1]}" = {number}\n' if number else ""

    head, ceilings = text.split("[ceilings]\n", 1)
    return head + "[ceilings]\n" + re.sub(r'^"([^"]+)" = (\d+)\n', line, ceilings, flags=re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check names and prose against docs/words.toml.")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to the present counts")
    parser.add_argument(
        "--list", metavar="FOLDER", help="print the findings of one folder, as the ceilings name it, or of one path"
    )
    options = parser.parse_args()
    words = _ROOT / "docs/words.toml"
    rules = Rules.parse(tomllib.loads(words.read_text()))
    pattern = rules.pattern
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py", "*.md"], cwd=_ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    findings = [f for path in tracked if (_ROOT / path).is_file() for f in check(path, (_ROOT / path).read_text(), pattern)]
    code = [p for p in tracked if p.endswith(".py") and not p.startswith("tests/") and (_ROOT / p).is_file()]
    findings += [f for path in code for f in function_names(path, (_ROOT / path).read_text(), rules.states, rules.verbs)]
    if options.list:
        findings = [f for f in findings if f.path.startswith(options.list) or folder(f.path) == options.list]
        remaining = [f for f in findings if not any(allowed.covers(f) for allowed in rules.allowed)]
        sys.stdout.writelines(f"{f.path}:{f.line}: {f.word}: {f.text[:140]}\n" for f in remaining)
        return 0
    counts, failures, slack = verdict(findings, rules)
    failures += _check_messages(tracked)
    failures += _check_test_names(tracked, rules.test_subjects)
    if options.lower:
        words.write_text(lower_ceilings(words.read_text(), counts))
    sys.stdout.writelines(f"{line}\n" for line in [*failures, *([] if options.lower else slack)])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
