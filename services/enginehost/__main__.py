"""`python -m services.enginehost SPEC.json`: one hosted engine. The file holds an `EngineStart` as JSON."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

import psutil
from pydantic import ValidationError

from services.enginehost.app import run_host
from services.enginehost.settings import HostSettings
from shared.contracts.engine import EngineStart
from shared.runtime import run_service


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m services.enginehost SPEC.json\n")
        return 2
    try:
        start = EngineStart.model_validate_json(Path(sys.argv[1]).read_bytes())
    except (OSError, ValidationError) as e:
        sys.stderr.write(f"enginehost: {sys.argv[1]}: {e}\n")
        return 2
    born = time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())
    os.environ.update(start.environment)
    os.environ["THAW_NODE"] = start.node
    return run_service("enginehost", HostSettings, partial(run_host, start=start, born=born))


if __name__ == "__main__":
    sys.exit(main())
