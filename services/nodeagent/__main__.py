"""Run a nodeagent: `python -m services.nodeagent`."""

import sys

from shared.imports import uncollected_imports

with uncollected_imports():
    from services.nodeagent.app import run
    from services.nodeagent.settings import NodeagentSettings
    from shared.runtime import run_service

if __name__ == "__main__":
    sys.exit(run_service("nodeagent", NodeagentSettings, run))
