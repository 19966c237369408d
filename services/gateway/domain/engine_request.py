"""What a client asked, as it goes to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shared.contracts.inference import Endpoint
from shared.contracts.models import ModelCard

JSON = "application/json"
_NOT_SENT: Any = {"info": {"modules": True, "adapter": {"modules"}}}
"""Of an adapter's card: what only its registration asks about."""


@dataclass(frozen=True)
class Ask:
    """`body`: JSON that has been validated, or, with another `content_type`, whatever bytes the client sent. `route`, `query` and `headers`
    are those of an `other` request; the rest have their meaning by their endpoint."""

    endpoint: Endpoint
    body: bytes
    route: str = ""
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = JSON
    adapter: ModelCard | None = None

    @property
    def is_json(self) -> bool:
        return self.content_type == JSON

    def with_body(self, body: bytes) -> Ask:
        """Return the same request with another body."""
        return replace(self, body=body)

    def envelope(self) -> dict[str, Any]:
        """The fields of `InferRequest` that are this request's, but for its body."""
        fields: dict[str, Any] = {"endpoint": self.endpoint}
        if self.route:
            fields |= {"route": self.route, "query": self.query, "headers": dict(self.headers)}
        if self.adapter is not None:
            fields["adapter"] = sent_card(self.adapter)
        return fields if self.is_json else fields | {"content_type": self.content_type}


def sent_card(adapter: ModelCard) -> dict[str, Any]:
    """An adapter's card, as far as an engine needs it."""
    return adapter.model_dump(mode="json", exclude=_NOT_SENT, exclude_defaults=True)
