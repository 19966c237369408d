"""The log file of this process."""

from __future__ import annotations

import os
from pathlib import Path


def redirect_output(log_path: str) -> None:
    """Redirect standard output and error to the log of an instance."""
    with Path(log_path).open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
