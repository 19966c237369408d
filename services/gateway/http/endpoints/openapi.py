"""/openapi.json, generated from the models that validate requests."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.http.endpoints.batches import BatchRequest
from services.gateway.http.error_formats import OLLAMA_PREFIX
from services.gateway.http.translation.messages_request import CountTokensRequest, MessagesRequest
from services.gateway.http.translation.ollama_requests import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaPull,
    OllamaShow,
)
from services.gateway.http.translation.responses_request import ResponsesRequest
from services.gateway.http.translation.scoring import RerankRequest, ScoreRequest
from shared.contracts.base import ErrorBody
from shared.contracts.findings import Diagnosis
from shared.contracts.latencies import LatencyHistory
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from shared.contracts.simulation import SimulationOptions

_PARAMETER = re.compile(r"{(\w+)}")
_REF = "#/components/schemas/{model}"
POSTS: dict[str, tuple[type[BaseModel], str, bool]] = {
    "/v1/chat/completions": (ChatCompletionRequest, "Answer a conversation.", True),
    "/v1/completions": (CompletionRequest, "Continue a prompt, or several.", True),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, in the form of OpenAI's Responses API.", True),
    "/v1/messages": (MessagesRequest, "Answer a conversation, in the form of Anthropic's Messages API.", True),
    "/v1/messages/count_tokens": (CountTokensRequest, "Count the tokens of a conversation.", False),
    "/v1/embeddings": (EmbeddingRequest, "Turn texts into vectors.", False),
    "/v1/rerank": (RerankRequest, "Order documents by their similarity to a query.", False),
    "/v1/score": (ScoreRequest, "Score the similarity of pairs of texts.", False),
    "/v1/batches": (BatchRequest, "Answer a file of requests when devices are idle.", False),
}
_OLLAMA_POSTS: dict[str, tuple[type[BaseModel], str, bool]] = {
    "/api/chat": (OllamaChat, "Answer a conversation.", True),
    "/api/generate": (OllamaGenerate, "Answer or continue a prompt.", True),
    "/api/embed": (OllamaEmbed, "Turn texts into vectors of length 1.", False),
    "/api/embeddings": (OllamaEmbeddings, "Turn a text into a vector.", False),
    "/api/show": (OllamaShow, "One registered model.", False),
    "/api/pull": (OllamaPull, "Download a registered model to a node's disk; needs an admin key.", True),
}
_GETS = {
    "/v1/models": "The registered models.",
    "/v1/models/{model}": "One registered model.",
    "/v1/responses/{id}": "One stored response of the API key.",
    "/v1/files": "The files of the API key.",
    "/v1/files/{id}": "One file.",
    "/v1/files/{id}/content": "The content of a file.",
    "/v1/batches": "The batches of the API key.",
    "/v1/batches/{id}": "One batch.",
    "/api/tags": "The registered models, for clients of Ollama.",
    "/api/ps": "The models with a ready instance, for clients of Ollama.",
    "/api/version": "The version of Ollama whose API this is.",
    "/admin/v1/doctor": "What is wrong with the mesh, what it means, and what to do.",
    "/admin/v1/models/{model}/latencies": "Objectives met, and cold and warm times to the first token of a model in the last hour.",
    "/admin/v1/simulations": "What a simulation of the recorded requests may be started with.",
    "/health": "Whether the process is alive.",
    "/ready": "Whether the gateway accepts requests.",
    "/metrics": "Prometheus metrics.",
}
_ANSWERS: dict[str, type[BaseModel]] = {
    "/admin/v1/doctor": Diagnosis,
    "/admin/v1/models/{model}/latencies": LatencyHistory,
    "/admin/v1/simulations": SimulationOptions,
}
"""Answers whose form is described."""
_DELETES = {
    "/v1/files/{id}": "Delete a file.",
    "/v1/responses/{id}": "Delete a stored response.",
}
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_ERROR_CODES = ("400", "401", "404", "413", "422", "429", "500", "503", "504")


@cache
def document() -> dict[str, Any]:
    """Build the OpenAPI document."""
    posts = POSTS | _OLLAMA_POSTS
    kinds = (*(kind for kind, _, _ in posts.values()), *_ANSWERS.values())
    described: list[tuple[type[BaseModel], Literal["validation"]]] = [(kind, "validation") for kind in kinds]
    references, schemas = models_json_schema(described, ref_template=_REF)
    components = schemas["$defs"] | {"Error": _error_schema(), "OllamaError": _OLLAMA_ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    paths: dict[str, Any] = {}
    for path, (kind, summary, streams) in posts.items():
        paths[path] = {"post": _post(path, references[(kind, "validation")], summary, streams)}
    for path, summary in _GETS.items():
        paths.setdefault(path, {})["get"] = _get(path, summary)
    for path, kind in _ANSWERS.items():
        paths[path]["get"]["responses"]["200"]["content"] = {"application/json": {"schema": references[(kind, "validation")]}}
    paths["/v1/files"]["post"] = _upload()
    for path, summary in _DELETES.items():
        paths[path]["delete"] = _get(path, summary)
    paths["/v1/batches/{id}/cancel"] = {"post": _get("/v1/batches/{id}/cancel", "Cancel a batch.")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Thaw", "version": "1.0", "description": "Endpoint of a Thaw mesh: OpenAI's API and Ollama's."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"bearer": []}],
    }


def _post(path: str, schema: Any, summary: str, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["application/x-ndjson" if path.startswith(OLLAMA_PREFIX) else "text/event-stream"] = {}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "The answer.", "content": content}} | _errors(path),
    }


def _get(path: str, summary: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "The answer."}} | _errors(path)}
    if names := _PARAMETER.findall(path):
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    return operation


def _upload() -> dict[str, Any]:
    operation = _get("/v1/files", "Upload the input of a batch.")
    fields = {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}
    schema = {"type": "object", "required": list(fields), "properties": fields}
    operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return operation


def _errors(path: str) -> dict[str, Any]:
    api, model = "OpenAI", "Error"
    if path.startswith(OLLAMA_PREFIX):
        api, model = "Ollama", "OllamaError"
    elif path.startswith("/v1/messages"):
        api, model = "Anthropic", "AnthropicError"
    content = {"application/json": {"schema": {"$ref": _REF.format(model=model)}}}
    return {code: {"description": f"An error in {api}'s shape.", "content": content} for code in _ERROR_CODES}


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
