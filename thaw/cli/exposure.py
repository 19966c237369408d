"""Check an endpoint's exposure to other machines, for `thaw up` and `thaw doctor`."""

from __future__ import annotations

import os

from shared.addresses import is_loopback
from shared.contracts.findings import Finding
from shared.contracts.keys import KeyList
from shared.diagnosis import examine_access
from thaw.cli.api import Api
from thaw.config.load import MeshConfig
from thaw.errors import CommandError
from thaw.launcher.home import Home
from thaw.launcher.plan import MeshPlan, read_plan
from thaw.launcher.planning import Wanted
from thaw.launcher.status import running_status

_SUBJECT = "keys"
_VARIABLE = "THAW_REQUIRE_KEY"


def of_running(api: Api, plan: MeshPlan) -> Finding:
    """Check the endpoint of a running mesh.

    Raises:
        CommandError: Its gateway does not answer.
    """
    return examine_access(plan.host, KeyList.model_validate(api.request("GET", "/admin/v1/keys")))


def of_wanted(wanted: Wanted) -> Finding:
    """Check the endpoint that `thaw up` would start.

    Keys that were made with `thaw keys add` are not known before the start.
    """
    configured = len(wanted.api_key_hashes) + bool(os.environ.get("THAW_API_KEYS")) + bool(os.environ.get("THAW_API_KEYS_FILE"))
    return examine_access(wanted.host_or_default, KeyList(configured=configured, required=requires_key(wanted)))


def of_home(home: Home) -> Finding:
    """Check the endpoint for `thaw doctor`.

    It is the endpoint of the mesh under `home`, or else that of this shell's variables.
    """
    try:
        return of_running(Api.from_home(home), read_plan(home)) if running_status(home) else of_wanted(Wanted(mesh=MeshConfig()))
    except (CommandError, ValueError) as e:
        return Finding(
            _SUBJECT, "warn", f"cannot determine who may use the endpoint: {e}", "`thaw ps` shows whether the gateway runs."
        )


def requires_key(wanted: Wanted) -> bool:
    """True if a gateway that is started so asks for a key before any exists."""
    setting = wanted.environment.get(_VARIABLE) or os.environ.get(_VARIABLE) or ""
    if setting:
        return setting.lower() in ("1", "true", "yes", "on", "t", "y")
    return not is_loopback(wanted.host_or_default)
