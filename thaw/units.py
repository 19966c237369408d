"""Durations and sizes as people write them: "30s", "5m", "8GiB", "1500MB"."""

from __future__ import annotations

import math
import re

from shared.device_list import LARGEST_BYTES

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)
_WHOLE = re.compile(r"[0-9]+")
_DURATION = re.compile(rf"(?:{_PART.pattern}\s*)+", re.IGNORECASE)
DURATION_HINT = 'a number of seconds, or a duration such as "500ms", "30s", "5m", "1h30m"'
SIZE_HINT = 'a number of bytes, or a size such as "1500MiB", "8GiB", "8GB"'


def parse_duration(text: str) -> float:
    """Seconds; raises ValueError."""
    text = text.strip()
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not {DURATION_HINT}")
    try:
        seconds = sum(float(number) * _SECONDS[unit.lower()] for number, unit in _PART.findall(text))
    except KeyError as e:
        raise ValueError(f"unknown unit {e.args[0]!r}; units are {', '.join(_SECONDS)}") from None
    if not math.isfinite(seconds):
        raise ValueError(f"{text[:40]}… is not a finite duration")
    return seconds


def parse_size(text: str) -> int:
    """Bytes; raises ValueError."""
    text = text.strip()
    match = _PART.fullmatch(f"{text}b" if _WHOLE.fullmatch(text) else text)
    if match is None:
        raise ValueError(f"{text!r} is not {SIZE_HINT}")
    number, unit = match.groups()
    unit = unit.lower()
    factor = _BYTES.get(unit) or _BYTES.get(f"{unit}ib") or _BYTES.get(unit.removesuffix("i") + "ib")
    if factor is None:
        raise ValueError(f"unknown unit {unit!r}; units are KiB, MiB, GiB, TiB, KB, MB, GB, TB")
    if float(number) * factor > LARGEST_BYTES:
        raise ValueError(f"{text[:40]!r} is not a size of at most {LARGEST_BYTES >> 60} EiB")
    return int(number) * factor if _WHOLE.fullmatch(number) else int(float(number) * factor)


def format_size(value: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit in ("B", "KiB") or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def written_duration(seconds: float) -> str:
    """Seconds as in a thaw.yaml, without loss: "500ms", "30s", "5m", "1h30m", "-1"."""
    if seconds <= 0 or (seconds < 1 and round(seconds * 1e3, 6) % 1):
        return f"{seconds:g}"
    if seconds < 1:
        return f"{seconds * 1e3:g}ms"
    if seconds % 1:
        return f"{seconds!r}s"
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return "".join(f"{number}{unit}" for number, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if number)


def format_duration(seconds: float) -> str:
    """Seconds for people: "850 ms", "12.3 s", "5 min", "2.0 h"."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
