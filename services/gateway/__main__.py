"""`python -m services.gateway`."""

import sys

from shared.imports import uncollected_imports

with uncollected_imports():
    import uvloop

    from services.gateway.app import app
    from services.gateway.settings import GatewaySettings
    from shared.runtime import run_service

if __name__ == "__main__":
    sys.exit(run_service("gateway", GatewaySettings, app, loop_factory=uvloop.new_event_loop))
