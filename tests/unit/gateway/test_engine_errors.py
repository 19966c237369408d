"""Engine errors in formats that API clients cannot parse."""

from __future__ import annotations

import json

import pytest

from services.gateway.http.error_formats import Anthropic, OpenAI
from services.gateway.http.responses.engine_errors import convert_error
from services.gateway.requests.passthrough import PassthroughResponse
from shared.contracts.inference import InferResponse


def relay(status: int, **headers: str) -> PassthroughResponse:
    return PassthroughResponse(InferResponse(seq=0, status=status, content_type="application/json", headers=headers))


@pytest.mark.parametrize(
    ("status", "body", "words", "code"),
    [
        (404, b'{"detail":"Not Found"}', "Not Found", "not_found"),
        (400, b'{"error":"model is not loaded"}', "model is not loaded", "invalid_request"),
        (400, b'{"object":"error","message":"too long","code":400}', "too long", "invalid_request"),
        (422, b'{"detail":[{"loc":["body","n"],"msg":"too many"}]}', "body.n: too many", "invalid_request"),
        (502, b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>", "engine_failed"),
        (500, b"", "no text", "engine_failed"),
        (500, b"[1]", "[1]", "engine_failed"),
    ],
)
def test_errors_of_other_forms_are_put_into_the_apis(status: int, body: bytes, words: str, code: str) -> None:
    error = convert_error(relay(status), body, OpenAI())
    assert error is not None
    assert error["error"]["message"] == f"The engine answered with status {status}: {words}"
    assert error["error"]["code"] == code


def test_openai_errors_and_successful_responses_pass_unchanged() -> None:
    sound = json.dumps({"error": {"message": "no", "type": "x", "code": "y"}}).encode()
    assert convert_error(relay(400), sound, OpenAI()) is None
    assert convert_error(relay(200), b'{"detail":"x"}', OpenAI()) is None
    assert convert_error(relay(400, **{"Content-Encoding": "gzip"}), b"\x1f\x8b", OpenAI()) is None


def test_anthropic_clients_receive_anthropic_errors() -> None:
    error = convert_error(relay(404), b'{"detail":"Not Found"}', Anthropic())
    assert error is not None
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
