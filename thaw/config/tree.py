"""Parse YAML into plain values, with the place of each in the file.

pydantic reports the error, and this module the place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from thaw.config.faults import Fault, Path

_MERGE = "<<"


@dataclass
class Tree:
    """Parsed YAML.

    Attributes:
        places: (line, column) of each value, by its path; keys have theirs under `keys`. Both count
            from 1.
    """

    value: Any = None
    places: dict[Path, tuple[int, int]] = field(default_factory=dict)
    keys: dict[Path, tuple[int, int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def place(self, path: Path) -> tuple[int, int]:
        """Return the position of `path`, or of its nearest parent in the file."""
        for length in range(len(path), -1, -1):
            found = self.keys.get(path[:length]) or self.places.get(path[:length])
            if found is not None:
                return found
        return (0, 0)

    def fault(self, path: Path, message: str) -> None:
        self.faults.append(Fault(*self.place(path), path, message))


def read_tree(text: str) -> Tree:
    """Parse `text`.

    A syntax error is one fault and an empty value; duplicate keys are faults each.
    """
    tree = Tree()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            tree.value = _Builder(tree).build(node, ())
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        tree.faults.append(Fault(line, column, (), _syntax(e, text, line)))
        tree.value = None
    except yaml.YAMLError as e:
        tree.faults.append(Fault(0, 0, (), f"not readable as YAML: {e}"))
    return tree


def _syntax(error: yaml.MarkedYAMLError, text: str, line: int) -> str:
    lines = text.splitlines()
    written = lines[line - 1] if 0 < line <= len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())] or "'\\t'" in str(error.problem):
        return "a tab; YAML indents with spaces only"
    problem = str(error.problem or error.context or error).strip()
    return f"not valid YAML: {problem}"


class _Builder:
    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._scalars = yaml.SafeLoader("")

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._tree.places[path] = (node.start_mark.line + 1, node.start_mark.column + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*path, i)) for i, child in enumerate(node.value)]
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as e:
            self._tree.fault(path, f"cannot be read: {getattr(e, 'problem', None) or e}")
            return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            place = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            if key == _MERGE:
                merged |= self._merge(value_node, path)
                continue
            here = (*path, key)
            if key in result:
                first = self._tree.keys[here][0]
                self._tree.faults.append(Fault(*place, here, f"the same key twice; it is on line {first} already"))
                continue
            self._tree.keys[here] = place
            result[key] = self.build(value_node, here)
        return {**merged, **result}

    def _merge(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        """The value of a `<<` key: a mapping, or a list of them of which earlier ones win."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, Any] = {}
        for each in nodes:
            if isinstance(each, yaml.MappingNode):
                result = {**self._mapping(each, path), **result}
        return result
