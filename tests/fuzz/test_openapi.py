"""Requests that (nearly) match /openapi.json cause no server error and no hang.

All refusals have one shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from services.gateway.http.endpoints.openapi import document

TIMEOUT_S = 60
"""Shows a hang; on a busy machine the gateway's thread may not run for seconds."""
OPERATIONS = [(method.upper(), path) for path, methods in document()["paths"].items() for method in methods]
quickly = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def schema() -> BaseSchema:
    return schemathesis.openapi.from_dict(document())


def run(test: Callable[[Case[Any], str], None], schema: BaseSchema, method: str, path: str, endpoint: str) -> None:
    """Run a test with requests for one operation.

    `schema.parametrize` makes these tests at collection, in each worker, and gives them one id,
    of which pytest-xdist runs one.
    """
    (made,) = get_all_tests(schema=schema.include(method=method, path=path), test_func=test, settings=quickly, given_kwargs=None)
    assert isinstance(made, Ok), made
    made.ok()[1](endpoint=endpoint)


def send(case: Case[Any], endpoint: str) -> None:
    response = case.call(base_url=endpoint, timeout=TIMEOUT_S)
    case.validate_response(response, checks=[not_a_server_error, content_type_conformance, response_schema_conformance])
    if response.status_code >= 400:
        error = response.json()["error"]
        if case.path.startswith("/api/"):
            assert isinstance(error, str)
        else:
            assert set(error) == (
                {"message", "type"} if case.path.startswith("/v1/messages") else {"message", "type", "param", "code"}
            )
            assert error["message"]
        assert response.headers["x-request-id"]


def send_to_known_model(case: Case[Any], endpoint: str) -> None:
    if isinstance(case.body, dict):
        case.body["model"] = "vectors" if any(word in case.path for word in ("embed", "rerank", "score")) else "alpha"
    send(case, endpoint)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_request_that_matches_the_schema_causes_no_server_error(schema: BaseSchema, method: str, path: str, endpoint: str) -> None:
    run(send, schema, method, path, endpoint)


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path in OPERATIONS if method == "POST"])
def test_valid_request_for_a_known_model_causes_no_server_error(schema: BaseSchema, method: str, path: str, endpoint: str) -> None:
    """Valid requests for known models get past the catalogue to the engine protocol."""
    run(send_to_known_model, schema, method, path, endpoint)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "alpha"',
        b"[" * 100_000,
        b'{"model": ' + b"9" * 5000 + b"}",
        b"\x00" * 1000,
    ],
)
def test_malformed_body_is_refused_with_the_expected_status(endpoint: str, path: str, body: bytes) -> None:
    import httpx

    answer = httpx.post(f"{endpoint}{path}", content=body, timeout=TIMEOUT_S)
    error: dict[str, Any] = answer.json()["error"]
    # No engine declares /v1/rerank here. The edge counts JSON values before it parses them.
    expected = 413 if body.startswith(b"[[") else 404 if path == "/v1/rerank" else 400
    assert (answer.status_code, error["type"]) == (expected, "invalid_request_error")
