"""Conversion of a model by its command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def convert(source: Path, destination: Path, *arguments: str) -> None:
    command = (sys.executable, "-m", "weights.convert", str(source), str(destination), *arguments)
    subprocess.run(command, check=True, capture_output=True)
