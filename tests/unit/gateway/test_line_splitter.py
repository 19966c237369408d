"""The lines of a batch's input file, whose parts end anywhere."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.domain.batches.line_splitter import LineSplitter, RawLine

LIMIT = 4


def split(parts: list[bytes], limit_bytes: int = LIMIT) -> list[RawLine]:
    splitter = LineSplitter(limit_bytes)
    return [line for part in parts for line in splitter.split(part)] + [splitter.end_line()]


@given(st.lists(st.text(alphabet="a\n", min_size=1, max_size=9).map(str.encode), max_size=5))
def test_lines_do_not_depend_on_the_parts(parts: list[bytes]) -> None:
    whole = b"".join(parts).split(b"\n")
    assert split(parts) == [RawLine(b"" if len(w) > LIMIT else w, len(w), len(w) > LIMIT) for w in whole]


def test_the_bytes_of_a_line_over_the_limit_are_counted_and_not_kept() -> None:
    """With all of them kept, each part of a line of 1 GB copied those before it."""
    part = b"a" * 65536
    tracemalloc.start()
    try:
        [line] = split([part] * 4096, limit_bytes=3 * len(part))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert line == RawLine(b"", 4096 * len(part), is_over=True)
    assert peak_bytes < 8 * len(part)
