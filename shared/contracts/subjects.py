"""Every NATS subject, stream and bucket of Thaw.

Two meshes on one NATS server use two NATS accounts, so subjects carry no mesh name. The version in
the prefix is the contract's major version.
"""

from __future__ import annotations

import base64

PREFIX = "thaw.v1"

# The scheduler's leader answers these (standbys do not subscribe).
DEMAND = f"{PREFIX}.scheduler.demand"
ADMIN = f"{PREFIX}.scheduler.admin"
OBJECTIVES = f"{PREFIX}.scheduler.objectives"
USAGE = f"{PREFIX}.scheduler.usage"

# Events, for any subscriber.
LOAD_FAILED = f"{PREFIX}.events.load_failed"
STATUS_WANTED = f"{PREFIX}.events.status_wanted"
ALL_NODE_STATUS = f"{PREFIX}.node.*.status"
ALL_NODE_CHANGES = f"{PREFIX}.node.*.changes"
ALL_LOADER_STATUS = f"{PREFIX}.loader.*.status"

# JetStream.
CATALOG_BUCKET = "thaw_catalog"
TRACE_STREAM = "THAW_TRACES"
TRACE_SUBJECTS = f"{PREFIX}.traces.>"
KEYED_STREAM = "THAW_KEYED_REPLIES"
KEYED_SUBJECTS = f"{PREFIX}.replies.keyed.>"
IDEMPOTENCY_BUCKET = "thaw_idempotency"
KEYS_BUCKET = "thaw_keys"
AUDIT_STREAM = "THAW_AUDIT"
AUDIT_SUBJECTS = f"{PREFIX}.audit.>"
AUDIT_KEYS = f"{PREFIX}.audit.keys"
MIGRATIONS_BUCKET = "thaw_migrations"
CONSOLE_BUCKET = "thaw_console"
RESPONSES_BUCKET = "thaw_responses"
BATCHES_BUCKET = "thaw_batches"
FILES_BUCKET = "thaw_files"


def token(name: str) -> str:
    """Encode `name` as one subject token or KV key.

    The encoding is URL-safe base64 without padding: names may hold dots, slashes and spaces.
    """
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def decode_token(value: str) -> str:
    """The name that `token` made `value` from."""
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).decode()


def node_command(node: str) -> str:
    return f"{PREFIX}.node.{token(node)}.command"


def node_status(node: str) -> str:
    return f"{PREFIX}.node.{token(node)}.status"


def node_changes(node: str) -> str:
    """Subject of the changes that a node reports between two statuses."""
    return f"{PREFIX}.node.{token(node)}.changes"


def node_logs(node: str) -> str:
    """Subject on which the nodeagent of a node answers `ListLogs` and `ReadLog`."""
    return f"{PREFIX}.node.{token(node)}.logs"


def engine_report(node: str) -> str:
    """Subject of the reports of a node's engines to their nodeagent."""
    return f"{PREFIX}.node.{token(node)}.engines"


def loader_command(node: str) -> str:
    return f"{PREFIX}.loader.{token(node)}.command"


def loader_status(node: str) -> str:
    return f"{PREFIX}.loader.{token(node)}.status"


def loader_files(node: str) -> str:
    """Subject on which the loader of a node answers `ReadModelFile`."""
    return f"{PREFIX}.loader.{token(node)}.files"


def instance_id(number: int, node: str) -> str:
    """Return the id of a new instance.

    The node's name is its last subject token, so that NATS can keep a node off the engines of
    others (thaw/permissions.conf). Ids of instances that a scheduler before this version started
    are one token.
    """
    return f"i-{number:x}.{node}"


def infer(instance_id: str) -> str:
    return f"{PREFIX}.engine.{instance_id}.infer"


def engine_control(instance_id: str) -> str:
    return f"{PREFIX}.engine.{instance_id}.control"


def executor_id(number: int, node: str) -> str:
    """Return the id of a new executor, which ends like an instance's for the same reason."""
    return f"x-{number:x}.{node}"


def executor_control(executor_id: str) -> str:
    """Subject of an executor's commands to attach and detach instances."""
    return f"{PREFIX}.executor.{executor_id}.control"


def stage_group(group_id: str) -> str:
    """Subject on which the stages of a group publish their addresses."""
    return f"{PREFIX}.stages.{group_id}"


def gateway_control(gateway_id: str) -> str:
    """Subject of commands to a gateway to change the route of one of its requests."""
    return f"{PREFIX}.gateway.{gateway_id}.control"


def gateway_limits(gateway_id: str) -> str:
    """Subject of requests to a gateway to lease limits of the API keys that it owns."""
    return f"{PREFIX}.gateway.{gateway_id}.limits"


GATEWAY_PRESENT = f"{PREFIX}.gateway.present"
"""Each gateway announces itself to the others."""
FIND_REQUEST = f"{PREFIX}.gateway.find"
"""Every gateway receives it; the one that holds the request answers."""
VIEW_LATENCIES = f"{PREFIX}.gateway.latencies"
"""Every gateway receives it, and answers."""
VIEW_REQUESTS = f"{PREFIX}.gateway.requests"
"""Every gateway receives it, and answers."""


def replies(gateway_id: str) -> str:
    """The one subscription of a gateway that carries all its streams."""
    return f"{PREFIX}.replies.{gateway_id}.*"


def reply(gateway_id: str, request_id: str) -> str:
    return f"{PREFIX}.replies.{gateway_id}.{request_id}"


def body_parts(gateway_id: str) -> str:
    """Subject on which a gateway answers `ReadBodyPart`.

    Nodes may publish below `replies`, and gateways subscribe there (thaw/permissions.conf).
    """
    return f"{PREFIX}.replies.{gateway_id}.body.read"


def gateway_of(reply: str) -> str:
    """The gateway that made a `reply` or `keyed_reply`."""
    return reply.split(".")[-2]


def keyed_replies(gateway_id: str) -> str:
    """A gateway's subscription to the streams of its requests with an Idempotency-Key."""
    return f"{PREFIX}.replies.keyed.{gateway_id}.*"


def keyed_reply(gateway_id: str, request_id: str) -> str:
    """Return a reply subject that `KEYED_STREAM` captures.

    Like `reply`, but another gateway can resume where this gateway stops.
    """
    return f"{PREFIX}.replies.keyed.{gateway_id}.{request_id}"


def keyed_marker(gateway_id: str) -> str:
    """The subject of messages that a gateway has `KEYED_STREAM` store after earlier replies."""
    return f"{PREFIX}.replies.keyed.marker.{gateway_id}"


def keyed_waiters(key: str) -> str:
    """Return the reply subject of requests that wait for a duplicate's response.

    Such requests have the same Idempotency-Key, given here by its digest.
    """
    return f"{PREFIX}.gateway.keyed.{key}.waiters"


def keyed_left(key: str) -> str:
    """One of those has left."""
    return f"{PREFIX}.gateway.keyed.{key}.left"


def request_trace(request_id: str) -> str:
    return f"{PREFIX}.traces.request.{token(request_id)}"


def load_trace(plan_id: str) -> str:
    return f"{PREFIX}.traces.load.{token(plan_id)}"
