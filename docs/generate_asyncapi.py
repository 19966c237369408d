"""Write the AsyncAPI 3.0 document of the mesh:
`python docs/generate_asyncapi.py > docs/asyncapi.json`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pydantic.json_schema import models_json_schema

from shared.contracts.base import CONTRACT_VERSION, Message
from shared.contracts.channels import CHANNELS, Channel

_SCHEMAS = "#/components/schemas/{model}"


def document() -> dict[str, Any]:
    """The document as JSON-ready data."""
    kinds = sorted({m for c in CHANNELS for m in (*c.messages, *c.replies)}, key=lambda m: m.__name__)
    _, schemas = models_json_schema([(kind, "serialization") for kind in kinds], ref_template=_SCHEMAS)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Thaw",
            "version": CONTRACT_VERSION,
            "description": "What Thaw's processes say to each other over NATS. Generated from shared/contracts.",
        },
        "defaultContentType": "application/json",
        "channels": {c.name: _channel(c) for c in CHANNELS},
        "operations": {c.name: _operation(c) for c in CHANNELS},
        "components": {"messages": {kind.__name__: _message(kind) for kind in kinds}, "schemas": schemas["$defs"]},
    }


def _channel(channel: Channel) -> dict[str, Any]:
    both = dict.fromkeys((*channel.messages, *channel.replies))
    found: dict[str, Any] = {
        "address": channel.address,
        "description": channel.summary,
        "messages": {kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"} for kind in both},
    }
    if parameters := re.findall(r"\{(\w+)\}", channel.address):
        found["parameters"] = {p: {"description": f"The {p}'s id."} for p in parameters}
    return found


def _operation(channel: Channel) -> dict[str, Any]:
    def refs(kinds: tuple[type[Message], ...]) -> list[dict[str, str]]:
        return [{"$ref": f"#/channels/{channel.name}/messages/{kind.__name__}"} for kind in kinds]

    found: dict[str, Any] = {
        "action": "receive",
        "channel": {"$ref": f"#/channels/{channel.name}"},
        "summary": f"Subscribed by: {channel.listener}. {channel.summary}",
        "messages": refs(channel.messages),
    }
    if channel.replies:
        found["reply"] = {"channel": {"$ref": f"#/channels/{channel.name}"}, "messages": refs(channel.replies)}
    return found


def _message(kind: type[Message]) -> dict[str, Any]:
    summary = (kind.__doc__ or kind.__name__).strip().split("\n\n", 1)[0].replace("\n    ", " ")
    return {"name": kind.__name__, "summary": summary, "payload": {"$ref": _SCHEMAS.format(model=kind.__name__)}}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(), indent=1) + "\n")
