"""Parsers for sizes, device lists and labels in settings.

Errors are ValueErrors that name the valid forms.
"""

from __future__ import annotations

from shared.device_list import WantedDevice as WantedDevice
from shared.device_list import parse_bytes as parse_bytes
from shared.device_list import parse_devices as parse_devices


def labels(text: str) -> dict[str, str]:
    """Parse 'zone=a,rack=12' to a mapping."""
    found: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{part!r} is not a label: write key=value, comma-separated")
        found[key.strip()] = value.strip()
    return found
