"""`python -m services.migrator`: the migrator."""

from __future__ import annotations

import sys

from shared.imports import uncollected_imports

with uncollected_imports():
    from services.migrator.app import run
    from services.migrator.settings import MigratorSettings
    from shared.runtime import run_service

if __name__ == "__main__":
    sys.exit(run_service("migrator", MigratorSettings, run))
