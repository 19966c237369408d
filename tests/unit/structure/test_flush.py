"""Nothing relies on nats-py's own flush, which the server may answer before it has the data."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CALL = re.compile(r"\b(?:nc|client|connection)\.flush\(")


def test_connections_are_flushed_by_the_function_that_waits_for_their_data() -> None:
    sources = [path for folder in ("bench", "services", "shared", "tests", "thaw") for path in (ROOT / folder).rglob("*.py")]
    calls = {path.relative_to(ROOT).as_posix(): len(CALL.findall(path.read_text())) for path in sources}
    # `flush` itself, and `Mesh.stop`, whose drain sends what is left.
    assert {path: n for path, n in calls.items() if n} == {"shared/messaging/mesh.py": 3}
