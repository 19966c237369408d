"""Run the tests that need a GPU, and count their results.

    python -m bench.gpu.suite --junit FILE [--tests PATH] [--json PATH]

The output is pytest's, with the milliseconds and bytes that the tests print. Exit status: pytest's;
1 if no test ran.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from bench.report import write

TESTS = "tests/gpu"


def count(junit: Path) -> dict[str, float]:
    """Return the numbers of passed, failed and skipped tests of pytest's XML file, and seconds.

    Raises:
        OSError: There is no such file.
        ElementTree.ParseError: The file has no results.
    """
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))

    def total(name: str) -> float:
        return sum(float(suite.get(name, 0)) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    return {"passed": total("tests") - failed - skipped, "failed": failed, "skipped": skipped, "seconds": total("time")}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.suite", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--junit", type=Path, required=True)
    parser.add_argument("--tests", default=TESTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.junit.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", options.tests, "-rs", "-s", f"--junitxml={options.junit}"]
    status = subprocess.run(command, check=False).returncode
    try:
        figures = count(options.junit)
    except (OSError, ElementTree.ParseError) as e:
        print(f"pytest has written no results: {e}")
        return status or 1
    write(options.json, figures)
    ran = figures["passed"] + figures["failed"]
    print(f"{figures['passed']:.0f} tests passed, {figures['failed']:.0f} failed, {figures['skipped']:.0f} skipped", flush=True)
    return status or (0 if ran else 1)


if __name__ == "__main__":
    sys.exit(main())
