"""Run an engine or executor without a zygote: `python -m services.engine SPEC.json`.

The file holds an `EngineStart` or `ExecutorStart` as JSON, and is removed once it has been read.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
from pydantic import ValidationError

from services.engine.process import end_process, import_libraries, prepare_environment, run_engine_process
from shared.contracts.executor import PROCESS_START
from shared.imports import uncollected_imports
from shared.start_files import take_start_file


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m services.engine SPEC.json\n")
        return 2
    try:
        start = PROCESS_START.validate_json(take_start_file(Path(sys.argv[1])))
    except (OSError, ValidationError) as e:
        sys.stderr.write(f"engine: {sys.argv[1]}: {e}\n")
        return 2
    age = max(0.0, time.time() - psutil.Process().create_time())
    process_start_s = time.monotonic() - age
    prepare_environment()
    with uncollected_imports():
        import_libraries()
    return run_engine_process(start, process_start_s)


if __name__ == "__main__":
    end_process(main())
