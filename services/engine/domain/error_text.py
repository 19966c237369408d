"""What of a library's error is fit for a client, a table and a log line."""

from __future__ import annotations

_LONGEST = 300


def first_words(error: BaseException) -> str:
    """The first paragraph of the message in one line, 300 characters at most."""
    text = " ".join(str(error).strip().split("\n\n", 1)[0].split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
