"""JSON as it is sent: UTF-8, without spaces between values."""

from __future__ import annotations

import json
from typing import Any


def encode_json(data: Any) -> bytes:
    """Encode compact JSON. Text that is not ASCII is written as it is, not escaped."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
