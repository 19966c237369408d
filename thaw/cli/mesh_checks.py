"""Check a mesh through its gateway, for `thaw doctor`."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import httpx

from shared.contracts.findings import Finding
from shared.diagnosis import examine_cluster, examine_gateway, report_no_scheduler
from thaw.cli.api import Api
from thaw.errors import CommandError

_WITHIN = httpx.Timeout(5.0, connect=3.0)


def examine_remote(api: Api) -> Iterator[Finding]:
    """Return findings about the mesh of another launcher (containers, systemd, another machine).

    This machine needs neither torch nor a state directory for it.
    """
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    yield from examine_mesh(api)


def examine_mesh(api: Api) -> Iterator[Finding]:
    """Return findings about the gateway and the cluster behind it."""
    gateway = _gateway(api)
    yield gateway
    if gateway.level == "fail":
        return
    try:
        cluster = api.cluster()
    except CommandError as e:
        yield report_no_scheduler(e.what) if e.code == "unreachable" else Finding("scheduler", "fail", e.what, e.remedy)
        return
    yield from examine_cluster(cluster)


def _gateway(api: Api) -> Finding:
    try:
        with api.client(_WITHIN) as client:
            response = client.get("/ready")
            state = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        text = f"{api.url} does not answer: {str(e) or type(e).__name__}"
        return Finding("gateway", "fail", text, "Start it, or correct THAW_URL.")
    except ValueError:
        return Finding("gateway", "fail", f"What answers at {api.url} is no gateway of Thaw.", "Correct THAW_URL.")
    faults = state.get("faults") if isinstance(state, dict) else None
    reasons = [str(fault) for fault in faults or ()] or ["it does not say why"]
    return examine_gateway(api.url, () if response.is_success else reasons)
