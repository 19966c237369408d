"""Check a mesh through its gateway, for `thaw doctor`.

Another launcher runs that mesh (containers, systemd, another machine).
"""

from __future__ import annotations

import platform
from collections.abc import Iterator

import httpx

from shared.contracts.admin import ClusterView
from thaw.cli.api import Api
from thaw.errors import CommandError
from thaw.launcher.finding import Finding
from thaw.launcher.memory_checks import findings_of_status

_WITHIN = httpx.Timeout(5.0, connect=3.0)


def examine_remote(api: Api) -> Iterator[Finding]:
    """Return findings about the mesh behind the gateway.

    This machine needs neither torch nor a state directory for it.
    """
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    gateway = _gateway(api)
    yield gateway
    if gateway.level == "fail":
        return
    try:
        cluster = api.cluster()
    except CommandError as e:
        yield Finding("scheduler", "fail", e.what, e.remedy)
        return
    yield Finding("scheduler", "ok", f"{cluster.scheduler} leads, epoch {cluster.epoch}")
    yield from _nodes(cluster)


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
    if response.is_success:
        return Finding("gateway", "ok", f"{api.url} is ready")
    return Finding("gateway", "fail", f"{api.url} is not ready: {'; '.join(map(str, faults or []))}", "Look at its log.")


def _nodes(cluster: ClusterView) -> Iterator[Finding]:
    if not cluster.nodes:
        yield Finding("nodes", "fail", "none has reported", "Start a nodeagent and a loader; their logs say what they lack.")
    for node in cluster.nodes:
        if not node.alive:
            yield Finding("node", "fail", f"{node.node} does not answer", "Look at its nodeagent's log.")
        elif not node.loader_alive:
            yield Finding("node", "fail", f"{node.node} has no loader that answers", "Look at its loader's log.")
        else:
            devices = ", ".join(d.device_id for d in node.devices) or "no devices"
            yield Finding("node", "ok" if node.devices else "warn", f"{node.node}: {devices}")
            yield from findings_of_status(node.node, node.loader.memory if node.loader is not None else ())
