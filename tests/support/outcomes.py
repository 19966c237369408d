"""A client's view of one request: a response, a well-formed error, or a fault.

The classification is strict.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import openai

QUESTION = "Where does the ice go?"
Kind = Literal["answered", "error", "stream error", "disconnected", "truncated", "malformed"]


def ask(client: openai.OpenAI, model: str = "one", tokens: int = 8) -> str:
    """Return the response to the standard client."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].message.content or ""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one request.

    Attributes:
        disconnected: The connection broke.
        truncated: The stream ended in order, without a finish or an error.
    """

    kind: Kind
    status: int | None = None
    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    tokens: int = 0

    @property
    def code(self) -> str | None:
        return self.error["code"] if self.error else None


class Asked(threading.Thread):
    """A request in progress in a thread; its first text sets `begun`.

    It trusts no certificate: reading the system's takes longer than a small request.
    """

    def __init__(
        self, url: str, model: str, *, stream: bool = True, tokens: int = 900, prompt: str = QUESTION, key: str = "", **more: Any
    ) -> None:
        """Start the request.

        Args:
            key: An Idempotency-Key.
        """
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self._url = url
        self._stream = stream
        self._headers = {"idempotency-key": key} if key else {}
        self._outcome: Outcome | None = None
        self._body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": stream,
            "ignore_eos": True,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            **more,
        }
        self.start()

    def outcome(self, within: float = 300.0) -> Outcome:
        self.join(within)
        assert self._outcome is not None, f"neither an answer nor an error within {within} s"
        return self._outcome

    def run(self) -> None:
        try:
            with (
                # Without the environment, which the command line changes in another thread.
                httpx.Client(timeout=240, verify=False, trust_env=False) as client,
                client.stream("POST", f"{self._url}/v1/chat/completions", json=self._body, headers=self._headers) as response,
            ):
                self._outcome = self._read_stream(response) if self._stream and response.is_success else _whole(response)
        except httpx.TransportError:
            self._outcome = Outcome("disconnected")

    def _read_stream(self, response: httpx.Response) -> Outcome:
        text: list[str] = []
        finish, tokens, done = None, 0, False
        for line in response.iter_lines():
            if not line or line.startswith(":"):
                continue
            if done or not line.startswith("data: "):
                return Outcome("malformed", response.status_code, line)
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                done = True
                continue
            try:
                event = json.loads(data)
            except ValueError:
                return Outcome("malformed", response.status_code, line)
            if "error" in event:
                return _error("stream error", response.status_code, event, "".join(text))
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                text.append(choice["delta"].get("content") or "")
                finish = choice["finish_reason"] or finish
                if text[-1]:
                    self.begun.set()
        whole = done and finish is not None
        return Outcome("answered" if whole else "truncated", response.status_code, "".join(text), finish, tokens=tokens)


def _whole(response: httpx.Response) -> Outcome:
    body = json.loads(response.read())
    if not response.is_success:
        return _error("error", response.status_code, body, "")
    (choice,) = body["choices"]
    usage = body["usage"]["completion_tokens"]
    return Outcome("answered", response.status_code, choice["message"]["content"], choice["finish_reason"], tokens=usage)


def _error(kind: Kind, status: int, body: dict[str, Any], text: str) -> Outcome:
    error = body.get("error")
    well_formed = isinstance(error, dict) and error.get("message") and error.get("type") and "code" in error and "param" in error
    return Outcome(kind if well_formed else "malformed", status, text, error=error if well_formed else None)
