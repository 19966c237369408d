"""SHA256SUMS of a model's files, as remote sources have it."""

from __future__ import annotations

import hashlib
from pathlib import Path


def write_sums(directory: Path) -> None:
    files = sorted(p for p in directory.iterdir() if p.name != "SHA256SUMS")
    (directory / "SHA256SUMS").write_text("".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files))
