"""A process in place of the simulator that reports progress and waits for the end of its input."""

from __future__ import annotations

import json
import sys


def main() -> None:
    order = json.loads(sys.stdin.readline())
    sys.stderr.write(json.dumps({"done": 1, "of": 2}) + "\n")
    sys.stderr.flush()
    assert order["limits"]["cpu_s"] >= 1
    sys.stdin.read()


if __name__ == "__main__":
    main()
