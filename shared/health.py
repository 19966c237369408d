"""Check a service's health for a container: `python -m shared.health SERVICE`.

The exit status is 0 for a healthy service, else 1 with the reason.

scheduler             some scheduler leads and answers over NATS: a standby is healthy as long as
                      its mesh has a leader
nodeagent, loader     this node's status is broadcast over NATS every second
migrator              NATS is reachable with the migrator's settings, and the bucket of migrations
                      is readable
gateway               /ready: connected to NATS, the catalogue read, not stopping

The check runs beside the service, with the same settings.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import urllib.error
import urllib.request

SERVICES = ("gateway", "scheduler", "migrator", "nodeagent", "loader")
_WITHIN_S = 5.0


async def _over_nats(service: str) -> None:
    # Imported here: the gateway's check, which is made more often, needs neither.
    from shared.contracts import subjects
    from shared.contracts.admin import ClusterView, ViewCluster
    from shared.messaging import Mesh
    from shared.messaging.streams import migrations_bucket
    from shared.settings import NodeSettings

    settings = NodeSettings()
    mesh = Mesh(settings, f"health-{service}")
    async with asyncio.timeout(_WITHIN_S):
        await mesh.start()
        try:
            if service == "scheduler":
                await mesh.request(subjects.ADMIN, ViewCluster(brief=True, deadline_ms=int(_WITHIN_S * 1e3)), ClusterView)
                return
            if service == "migrator":
                await (await migrations_bucket(mesh.nc.jetstream(timeout=_WITHIN_S), mesh.replicas)).status()
                return
            subject = (subjects.node_status if service == "nodeagent" else subjects.loader_status)(settings.node)
            statuses = await mesh.nc.subscribe(subject)
            try:
                await statuses.next_msg(timeout=_WITHIN_S)
            finally:
                # Stopping would wait for a reader of the statuses that arrived meanwhile.
                await statuses.unsubscribe()
        finally:
            await mesh.stop()


def _over_http() -> None:
    port = os.environ.get("THAW_GATEWAY_PORT", "8080")
    scheme = "https" if os.environ.get("THAW_TLS_CERTIFICATE") else "http"
    # The certificate is for a name of the outside; what answers here is the container's own
    # gateway.
    unchecked = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), unchecked)
    opener.open(f"{scheme}://127.0.0.1:{port}/ready", timeout=_WITHIN_S).close()


def check(service: str) -> str | None:
    """Return the fault; None if there is none."""
    from shared.errors import ThawError

    try:
        if service == "gateway":
            _over_http()
        else:
            asyncio.run(_over_nats(service))
    except urllib.error.HTTPError as e:
        return e.read().decode(errors="replace")
    except ThawError as e:
        return e.message
    except (OSError, TimeoutError) as e:
        return f"{type(e).__name__}: {e}"
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in SERVICES:
        sys.exit(f"usage: python -m shared.health {'|'.join(SERVICES)}")
    sys.exit(check(sys.argv[1]))
