"""The files beside the weights: configuration, tokenizer, templates, licence.

They are copied as they are.
"""

from __future__ import annotations

from pathlib import Path

from weights.convert.disk import write_file
from weights.formats.checkpoint import read_small
from weights.formats.converted import INDEX_NAME
from weights.formats.root import check_inside

_PATTERNS = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.py",
    "*.md",
    "LICENSE*",
    "NOTICE*",
    "*/config.json",
    "*/*.jinja",
)


def companions(root: Path) -> list[Path]:
    """Relative paths of the small files of the model in `root`, sorted.

    Raises `CheckpointInvalid` for links that leave it.
    """
    found = {p.relative_to(root) for pattern in _PATTERNS for p in root.glob(pattern) if p.is_file()}
    wanted = sorted(p for p in found if not any(part.startswith(".") for part in p.parts) and not _index(p.name))
    for path in wanted:
        check_inside(root, root / path)
    return wanted


def _index(name: str) -> bool:
    return name.endswith((".safetensors.index.json", ".bin.index.json")) or name == INDEX_NAME


def copy_companions(root: Path, into: Path) -> int:
    """Copies them, each under its own relative path; how many."""
    wanted = companions(root)
    for path in wanted:
        write_file(into / path, read_small(root / path))
    return len(wanted)
