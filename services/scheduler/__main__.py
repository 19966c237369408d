"""`python -m services.scheduler`"""

from __future__ import annotations

import sys

from shared.imports import uncollected_imports

with uncollected_imports():
    from services.scheduler.app import run
    from services.scheduler.settings import SchedulerSettings
    from shared.runtime import run_service

if __name__ == "__main__":
    sys.exit(run_service("scheduler", SchedulerSettings, run))
