"""/openapi.json, generated from the models that validate requests."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.http.translation.responses_request import ResponsesRequest
from shared.contracts.base import ErrorBody
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest

_REF = "#/components/schemas/{model}"
POSTS: dict[str, tuple[type[BaseModel], str, bool]] = {
    "/v1/chat/completions": (ChatCompletionRequest, "Answer a conversation.", True),
    "/v1/completions": (CompletionRequest, "Continue a prompt, or several.", True),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, in the form of OpenAI's Responses API.", True),
    "/v1/embeddings": (EmbeddingRequest, "Turn texts into vectors.", False),
}
_GETS = {
    "/v1/models": "The registered models.",
    "/v1/models/{model}": "One registered model.",
    "/health": "Whether the process is alive.",
    "/ready": "Whether the gateway accepts requests.",
    "/metrics": "Prometheus metrics.",
}
_ERROR_CODES = ("400", "401", "404", "413", "422", "429", "500", "503", "504")


@cache
def document() -> dict[str, Any]:
    """Build the OpenAPI document."""
    kinds = [kind for kind, _, _ in POSTS.values()]
    references, schemas = models_json_schema([(k, "validation") for k in kinds], ref_template=_REF)
    components = schemas["$defs"] | {"Error": _error_schema()}
    paths: dict[str, Any] = {}
    for path, (kind, summary, streams) in POSTS.items():
        paths[path] = {"post": _post(references[(kind, "validation")], summary, streams)}
    for path, summary in _GETS.items():
        paths[path] = {"get": _get(path, summary)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Thaw", "version": "1.0", "description": "OpenAI-compatible endpoint of a Thaw mesh."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"bearer": []}],
    }


def _post(schema: Any, summary: str, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "The answer.", "content": content}} | _errors(),
    }


def _get(path: str, summary: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "The answer."}} | _errors()}
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    return operation


def _errors() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {code: {"description": "An error in OpenAI's shape.", "content": content} for code in _ERROR_CODES}


def _error_schema() -> dict[str, Any]:
    fields = {"message": "string", "type": "string", "param": ["string", "null"], "code": ["string", "null"]}
    assert fields.keys() <= ErrorBody.model_fields.keys()
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {"type": "object", "required": list(fields), "properties": {k: {"type": t} for k, t in fields.items()}}
        },
    }
