"""Encoding of the message that asks an instance for a response."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.fair_queue import flow_of
from services.gateway.domain.ticket import Ticket
from shared.contracts.base import CONTRACT_VERSION
from shared.contracts.objectives import ObjectiveStanding


@dataclass(frozen=True, slots=True)
class InferMessage:
    """An encoded `InferRequest`, and where it goes."""

    attempt_id: str
    instance_id: str
    payload: bytes
    traceparent: str | None


def encode_infer(
    ticket: Ticket, request: EngineRequest, resume: dict[str, Any] | None, standing: ObjectiveStanding | None = None
) -> InferMessage:
    """Encode the ticket's present attempt.

    Args:
        resume: Fields of the `Resume` message; None to start the response.
        standing: How many requests of the model met its objective; None: unknown.
    """
    instance_id = ticket.instance_id or ""
    envelope = {
        "v": CONTRACT_VERSION,
        "kind": "infer",
        "deadline_ms": max(1, int((ticket.response_timeout_s - ticket.elapsed_s) * 1e3)),
        "request_id": ticket.attempt_id,
        "instance_id": instance_id,
        "model": ticket.model,
        **request.envelope(),
    }
    if resume is not None:
        envelope["resume"] = resume
    if standing is not None:
        envelope["standing"] = standing.model_dump()
    if ticket.key or ticket.priority:
        envelope["share"] = {"flow": flow_of(ticket.key), "weight": ticket.weight, "priority": ticket.priority}
    # The validated JSON is embedded unchanged: encoding it again would cost more than all the rest.
    if request.is_json:
        body = b'"body":%b' % request.body
    else:
        body = b'"data":"%b"' % base64.b64encode(request.body) if request.held is None else b'"data":null'
    payload = b"%b,%b}" % (json.dumps(envelope).encode()[:-1], body)
    return InferMessage(ticket.attempt_id, instance_id, payload, ticket.traceparent)
