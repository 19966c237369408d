"""The loader, whose peers may be slow: `python -m tests.support.patient_loader`.

It reads from a model's source if its peers fail, but not if a process is paused for seconds.
"""

from __future__ import annotations

import sys
from typing import Final

from services.loader.app import run
from services.loader.settings import LoaderSettings
from shared.runtime import run_service
from weights.sources import peer
from weights.tiers.connection import Patience
from weights.transfer import stripe_plan

MODULE: Final = "tests.support.patient_loader"
_PATIENCE_S = 60.0


if __name__ == "__main__":
    vars(stripe_plan)["RESERVE_AFTER_S"] = _PATIENCE_S
    vars(peer)["_PATIENCE"] = Patience(connect_s=_PATIENCE_S, stall_s=_PATIENCE_S)
    sys.exit(run_service("loader", LoaderSettings, run))
