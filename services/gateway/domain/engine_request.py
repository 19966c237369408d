"""A client's request in the form that goes to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shared.contracts.inference import Endpoint
from shared.contracts.models import ModelCard
from shared.contracts.request_body import HeldBody

JSON = "application/json"
_REGISTRATION_FIELDS: Any = {"info": {"modules": True, "adapter": {"modules"}}}
"""Fields of a LoRA adapter's card that only its registration uses."""


@dataclass(frozen=True)
class EngineRequest:
    """One request, as an engine receives it.

    Attributes:
        body: Validated JSON, or the client's bytes if `content_type` is not JSON.
        route: Path of an `other` request, which only its engine understands.
        query: Query string of an `other` request.
        headers: Headers of an `other` request that are forwarded.
        lora_adapter: The LoRA adapter to respond with; None: the model itself.
        held: The client's body, if it exceeds a message; `body` is its outline then.
        held_digest: SHA-256 of that body, for an Idempotency-Key.
    """

    endpoint: Endpoint
    body: bytes
    route: str = ""
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = JSON
    lora_adapter: ModelCard | None = None
    held: HeldBody | None = None
    held_digest: str = ""

    @property
    def identity(self) -> bytes:
        """The body, or the digest of one that exceeds a message: outlines have random markers."""
        return self.body if self.held is None else self.held_digest.encode()

    @property
    def is_json(self) -> bool:
        return self.content_type == JSON

    def with_body(self, body: bytes) -> EngineRequest:
        """Return the same request with another body."""
        return replace(self, body=body)

    def envelope(self) -> dict[str, Any]:
        """Build the fields of `InferRequest` that this request sets, except its body."""
        fields: dict[str, Any] = {"endpoint": self.endpoint}
        if self.route:
            fields |= {"route": self.route, "query": self.query, "headers": dict(self.headers)}
        if self.lora_adapter is not None:
            fields["adapter"] = engine_card(self.lora_adapter)
        if self.held is not None:
            fields |= {"kind": "infer_held", "held": self.held.model_dump()}
        return fields if self.is_json else fields | {"content_type": self.content_type}


def engine_card(lora_adapter: ModelCard) -> dict[str, Any]:
    """Dump the fields of a LoRA adapter's card that an engine needs."""
    return lora_adapter.model_dump(mode="json", exclude=_REGISTRATION_FIELDS, exclude_defaults=True)
