"""OpenAI's Batch API. The batches are run by `http/batches`."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.domain.batches.batch import ENDPOINTS, Batch, request_cancel
from services.gateway.domain.batches.owner_state import add_batch, change_batch
from services.gateway.http.endpoints.files import bounds_of, owner_of
from services.gateway.http.endpoints.listing import page_of
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.body import read_body
from services.gateway.http.parsing.validation import validate_body
from services.gateway.loop import Gateway

ROUTE = "/v1/batches"
_MAX_BODY_BYTES = 64 * 1024
_UNITS_S = {"m": 60, "h": 3600}


class BatchRequest(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(extra="ignore")

    input_file_id: str = Field(min_length=1, max_length=100)
    endpoint: str
    completion_window: str = Field(pattern=r"^[1-9][0-9]{0,3}[mh]$", description="24h, or a shorter time such as 30m.")
    metadata: (
        Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None
    ) = None

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value not in ENDPOINTS:
            raise ValueError(f"must be one of {', '.join(ENDPOINTS)}")
        return value

    @field_validator("completion_window")
    @classmethod
    def _check_window(cls, value: str) -> str:
        if window_s(value) > 24 * 3600:
            raise ValueError("must be at most 24h")
        return value


def window_s(text: str) -> int:
    """Return a completion window in seconds."""
    return int(text[:-1]) * _UNITS_S[text[-1]]


def batch_object(batch: Batch) -> dict[str, Any]:
    """Describe a batch as OpenAI's API does."""
    errors = {"object": "list", "data": [e.model_dump(mode="json") for e in batch.errors]} if batch.errors else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "expired_at": batch.expired_at,
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": batch.cancelled_at,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


class Batches:
    """`/v1/batches`. A batch exists only for the API key that made it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._bounds = bounds_of(gateway.settings)

    def routes(self) -> list[Route]:
        return [
            Route(ROUTE, self.create, methods=["POST"]),
            Route(ROUTE, self.list, methods=["GET"]),
            Route(ROUTE + "/{id}", self.read, methods=["GET"]),
            Route(ROUTE + "/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        body = await read_body(request.scope, request.receive, _MAX_BODY_BYTES)
        asked = validate_body(BatchRequest, body)
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            window_s=window_s(asked.completion_window),
            created_at=int(time.time()),
            metadata=asked.metadata,
        )
        await self._gateway.batches.change(owner_of(request.scope), partial(add_batch, batch=batch, bounds=self._bounds))
        return json_response(batch_object(batch))

    async def list(self, request: Request) -> Response:
        state = await self._gateway.batches.read(owner_of(request.scope))
        return json_response(page_of(request, [batch_object(b) for b in reversed(state.batches)], default=20, most=100))

    async def read(self, request: Request) -> Response:
        state = await self._gateway.batches.read(owner_of(request.scope))
        return json_response(batch_object(state.batch(request.path_params["id"])))

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch; one that has ended stays as it is."""
        batch_id, cancel = request.path_params["id"], partial(request_cancel, now=int(time.time()))
        state = await self._gateway.batches.change(owner_of(request.scope), lambda s: change_batch(s, batch_id, cancel))
        return json_response(batch_object(state.batch(batch_id)))
