"""Check an endpoint's exposure to other machines, for `thaw up` and `thaw doctor`."""

from __future__ import annotations

import os

from shared.addresses import is_loopback
from shared.contracts.keys import KeyList
from thaw.cli.api import Api
from thaw.config.load import MeshConfig
from thaw.errors import CommandError
from thaw.launcher.finding import Finding
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
    return judge(plan.host, KeyList.model_validate(api.request("GET", "/admin/v1/keys")))


def of_wanted(wanted: Wanted) -> Finding:
    """Check the endpoint that `thaw up` would start.

    Keys that were made with `thaw keys add` are not known before the start.
    """
    configured = len(wanted.api_key_hashes) + bool(os.environ.get("THAW_API_KEYS")) + bool(os.environ.get("THAW_API_KEYS_FILE"))
    return judge(wanted.host_or_default, KeyList(configured=configured, required=requires_key(wanted)))


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


def judge(host: str, keys: KeyList) -> Finding:
    """True if strangers can use an endpoint at `host` with these keys."""
    exists = bool(keys.configured) or any(key.scope == "inference" for key in keys.keys)
    if is_loopback(host):
        text = "a key is needed" if exists or keys.required else "no key is needed, and only this machine reaches the endpoint"
        return Finding(_SUBJECT, "ok", text)
    if exists:
        return Finding(_SUBJECT, "ok", f"the endpoint listens at {host} and needs a key")
    if keys.required:
        return Finding(
            _SUBJECT,
            "warn",
            f"the endpoint listens at {host} without any key: every request is refused",
            "Make a key with `thaw keys add NAME`.",
        )
    return Finding(
        _SUBJECT,
        "warn",
        f"THE ENDPOINT IS OPEN: it listens at {host} without any key, and {_VARIABLE}=false lets every machine that reaches it infer",
        f"Make a key with `thaw keys add NAME` and take {_VARIABLE}=false away, or start it with --host 127.0.0.1.",
    )


def requires_key(wanted: Wanted) -> bool:
    """True if a gateway that is started so asks for a key before any exists."""
    setting = wanted.environment.get(_VARIABLE) or os.environ.get(_VARIABLE) or ""
    if setting:
        return setting.lower() in ("1", "true", "yes", "on", "t", "y")
    return not is_loopback(wanted.host_or_default)
