"""Convert a checkpoint; what `thaw convert` runs.

    python -m weights.convert SRC DST [--tensor-parallel N] [--verify]

prints its progress and then its report as lines of JSON; a refusal is `{"error": …}` and status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from shared.errors import ThawError
from weights.convert.job import convert
from weights.formats.converted import MAX_RANKS
from weights.formats.verify import verify

_PROGRESS_EVERY_S = 0.1
_ENDS = (signal.SIGINT, signal.SIGTERM)


class _Printer:
    """Progress on standard output, not for every piece.

    Who reads it being gone ends the conversion, as its output has no use.
    """

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next or done == total:
            self._next = now + _PROGRESS_EVERY_S
            _print({"stage": stage, "done": done, "total": total})


def _print(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m weights.convert", description="Convert a checkpoint.")
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path, nargs="?", help="With --verify alone: check the converted SRC.")
    parser.add_argument("--tensor-parallel", type=int, default=1, choices=range(1, MAX_RANKS + 1), metavar="N")
    parser.add_argument("--verify", action="store_true")
    options = parser.parse_args(arguments)
    if options.destination is None and not options.verify:
        parser.error("name the destination")
    for number in _ENDS:
        signal.signal(number, _end)
    try:
        _print({"report": _run(options, _Printer())})
    except ThawError as e:
        _print({"error": e.body().model_dump()})
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Python would write the rest of its buffer at the end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return os.EX_OK


def _end(number: int, frame: FrameType | None) -> None:
    """End the conversion on the first signal, and ignore all later signals.

    The first signal removes the unfinished output, which a second signal must not interrupt: Ctrl-C
    reaches the whole process group, and `thaw convert` sends its own signal.
    """
    for other in _ENDS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(options: argparse.Namespace, progress: _Printer) -> dict[str, Any]:
    started = time.monotonic()
    if options.destination is None:
        checked = verify(options.source)
        return {"ranks": checked.ranks, "tensors": checked.tensors, "bytes": checked.bytes, **_cost(started, checked.bytes)}
    done = convert(options.source, options.destination, options.tensor_parallel, check=options.verify, progress=progress)
    return {**vars(done), **_cost(started, done.source_bytes)}


def _cost(started: float, count: int) -> dict[str, Any]:
    """Measure the cost of the conversion.

    Args:
        started: Its start, in monotonic seconds.
        count: Bytes that it has read.

    Returns:
        Figures by name. `peak_bytes` counts pages of mapped source files too, which the kernel may
        reclaim at any time.
    """
    usage, seconds = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - started
    return {
        "seconds": round(seconds, 3),
        "gb_per_s": round(count / max(seconds, 1e-9) / 1e9, 3),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int:
    """Return the peak memory of this program alone, in bytes.

    getrusage's figure begins with that of the parent process.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main())
