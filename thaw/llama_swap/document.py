"""Write the thaw.yaml of an import.

It has options, and a comment for everything that has no counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml


@dataclass(frozen=True)
class Loss:
    """One key of the source that has no counterpart.

    Attributes:
        path: The key, as `models.qwen.filters`.
        reason: Thaw's behaviour instead, in one sentence.
    """

    path: str
    reason: str


@dataclass
class ModelDraft:
    """One entry of `models:`.

    Attributes:
        options: Keys and values as they are written.
        losses: Keys of this model without a counterpart.
        missing: Keys that Thaw requires and the source does not state, with what to write.
    """

    options: dict[str, Any] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass
class Draft:
    """A whole thaw.yaml."""

    mesh: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    models: list[ModelDraft] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    def all_losses(self) -> list[Loss]:
        """Return the losses of the file and of every model."""
        return [*self.losses, *(loss for model in self.models for loss in model.losses)]

    def all_missing(self) -> list[str]:
        """Return every required key that is not set, as `model: key`."""
        return [f"{model.options['name']}: {key}" for model in self.models for key in model.missing]


def render(draft: Draft, source: str) -> str:
    """Return `draft` as the text of a thaw.yaml.

    Args:
        draft: The translated configuration.
        source: Name of the file that it was made from, for the first comment.
    """
    lines = [f"# Written by `thaw import llama-swap` from {source}. Comments marked with ! name what has no counterpart."]
    lines += _comments(draft.losses, "")
    for name, section in (("mesh", draft.mesh), ("defaults", draft.defaults)):
        if section:
            lines += ["", f"{name}:", *_mapping(section, "  ")]
    lines += ["", "models:"]
    for number, model in enumerate(draft.models):
        lines += [""] if number else []
        lines += _model(model)
    return "\n".join(lines) + "\n"


def _model(model: ModelDraft) -> Iterator[str]:
    yield from _comments(model.losses, "  ")
    first, *rest = _mapping(model.options, "    ")
    yield "  - " + first.removeprefix("    ")
    yield from rest
    for key, hint in model.missing.items():
        yield f"    # {key}:  # REQUIRED: {hint}"


def _comments(losses: list[Loss], indent: str) -> list[str]:
    return [f"{indent}# ! {loss.path}: {loss.reason}" for loss in losses]


def _mapping(values: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value and (len(value) > 1 or len(_flow(value)) > 80):
            lines += [f"{indent}{_flow(key)}:", *_mapping(value, indent + "  ")]
        else:
            lines.append(f"{indent}{_flow(key)}: {_flow(value)}")
    return lines


def _flow(value: Any) -> str:
    """Return `value` on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
