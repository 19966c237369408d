"""Check a service's health for a container: `python -m shared.health SERVICE`.

The exit status is 0 for a healthy service, else 1 with the reason.

scheduler             some scheduler leads and answers over NATS: a standby is healthy as long as
                      its mesh has a leader
nodeagent, loader     this node's status is broadcast over NATS every second
migrator              NATS is reachable with the migrator's settings, and the bucket of migrations
                      is readable
gateway               /ready: connected to NATS, the catalogue read, not stopping

The check runs beside the service, with the same settings, every few seconds on each node. It
therefore imports little: neither the contracts nor the mesh's connection, which take four times the
processor time.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

from shared.contracts import subjects
from shared.nats_urls import inbox_prefix, requires_tls

SERVICES = ("gateway", "scheduler", "migrator", "nodeagent", "loader")
_WITHIN_S = 5.0
VIEW = {"kind": "view", "deadline_ms": int(_WITHIN_S * 1e3), "brief": True}
"""`ViewCluster`, without the import of its model."""


async def _over_nats(service: str) -> str | None:
    """Return the fault; None if there is none. Raises `TimeoutError` and `nats.errors.Error`."""
    import nats  # the gateway's check does not need it
    from nats.errors import NoRespondersError
    from nats.js.errors import BucketNotFoundError

    urls = [url.strip() for url in (_setting("nats_url") or "nats://127.0.0.1:4222").split(",")]
    tls = {"tls_handshake_first": True} if requires_tls(urls) else {}
    async with asyncio.timeout(_WITHIN_S):
        nc = await nats.connect(
            urls, name=f"health-{service}", inbox_prefix=inbox_prefix(urls[0]), allow_reconnect=False, error_cb=_ignore, **tls
        )
        try:
            match service:
                case "scheduler":
                    reply = await nc.request(subjects.ADMIN, json.dumps(VIEW).encode(), timeout=_WITHIN_S)
                    view = json.loads(reply.data)
                    return view["error"]["message"] if view["kind"] == "failure" else None
                case "migrator":
                    await (await nc.jetstream(timeout=_WITHIN_S).key_value(subjects.MIGRATIONS_BUCKET)).status()
                case _:
                    node = _setting("node") or "node-0"
                    subject = subjects.node_status(node) if service == "nodeagent" else subjects.loader_status(node)
                    await (await nc.subscribe(subject, max_msgs=1)).next_msg(timeout=_WITHIN_S)
        except NoRespondersError:
            return "No process answers as the scheduler: none leads"
        except BucketNotFoundError:
            return "The bucket of migrations does not exist yet"
        finally:
            await nc.close()
    return None


def _setting(name: str) -> str | None:
    """Return a setting as `shared.settings` reads it."""
    if value := os.environ.get(f"THAW_{name.upper()}"):
        return value
    file = Path(os.environ.get("THAW_SECRETS_DIR", "/nonexistent")) / f"thaw_{name}"
    return file.read_text().strip() if file.is_file() else None


async def _ignore(_: Exception) -> None:
    """The error ends the check, which reports it."""


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
    try:
        if service == "gateway":
            _over_http()
            return None
        return asyncio.run(_over_nats(service))
    except urllib.error.HTTPError as e:
        return e.read().decode(errors="replace")
    except TimeoutError:
        return f"TimeoutError: nothing within {_WITHIN_S:g} s; is NATS reachable, and does the {service} run?"
    except Exception as e:  # of whatever kind: the service is not healthy, and this is why
        return f"{type(e).__name__}: {e}"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in SERVICES:
        sys.exit(f"usage: python -m shared.health {'|'.join(SERVICES)}")
    sys.exit(check(sys.argv[1]))
