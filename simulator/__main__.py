"""`python -m simulator < order.json`, the process behind `thaw simulate` and the console.

The order is one line.

Prints one JSON document, or `{"error": …}` with exit status 1. Progress goes to standard error, one
JSON object per line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pydantic import ValidationError

from shared.errors import InsufficientMemory, InvalidRequest, ThawError
from simulator import recording
from simulator.order import Order, document, outcomes
from simulator.process_limits import apply_limits, open_reserve


def progress(done: int, total: int) -> None:
    sys.stderr.write(json.dumps({"done": done, "of": total}) + "\n")
    sys.stderr.flush()


def parse_order(text: str) -> dict[str, Any]:
    try:
        order = Order.model_validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc'])) or 'the order'}: {first['msg']}") from e
    if order.limits is not None:
        apply_limits(order.limits.cpu_s, order.limits.memory_bytes)
    if order.plots is not None:
        from simulator import plots

        plots.check_available()
    recorded = recording.write(order.recording, replay=order.trace is not None) if order.recording is not None else None
    runs = outcomes(order, progress)
    titled = [(name if without is None else f"{name} without {without}", seed, outcome) for name, without, seed, outcome in runs]
    made = [str(p) for p in plots.draw(titled, order.plots)] if order.plots is not None else []
    found = {**document(runs), "plots": made}
    return found if recorded is None else {**found, "recorded": recorded.figures()}


def main() -> int:
    try:
        found, status = parse_order(sys.stdin.readline()), os.EX_OK
    except ThawError as e:
        found, status = {"error": e.body().model_dump()}, 1
    except MemoryError:
        open_reserve()
        error = InsufficientMemory("The simulation needs more memory than its process may have. Replay fewer requests")
        found, status = {"error": error.body().model_dump()}, 1
    sys.stdout.write(json.dumps(found) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
