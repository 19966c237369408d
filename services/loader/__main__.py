"""`python -m services.loader`: the loader of this node."""

from __future__ import annotations

import sys

from shared.imports import uncollected_imports

with uncollected_imports():
    from services.loader.app import run
    from services.loader.settings import LoaderSettings
    from shared.runtime import run_service

if __name__ == "__main__":
    sys.exit(run_service("loader", LoaderSettings, run))
