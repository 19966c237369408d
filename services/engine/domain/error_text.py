"""Short forms of library errors for clients, tables and logs."""

from __future__ import annotations

_LONGEST = 300


def first_paragraph(error: BaseException) -> str:
    """The first paragraph of the message on one line, at most 300 characters."""
    text = " ".join(str(error).strip().split("\n\n", 1)[0].split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
