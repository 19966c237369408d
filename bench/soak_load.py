"""Send a steady mixed load to a mesh: a fixed number of requests per second.

The rate does not depend on earlier requests. A deck of requests is dealt again and again, always in
the same order: streamed, whole, keyed (sent twice), to a LoRA adapter, cancelled after a few
tokens, malformed. They are for a model that is always on a device, and for models that compete for
the rest. The least recently requested of these is cold wherever there is no room for all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx

STREAMED, WHOLE, KEYED, ADAPTER, CANCELLED, MALFORMED, SWAP, AGAIN = (
    "streamed", "whole", "keyed", "adapter", "cancelled", "malformed", "swap", "again",
)  # fmt: skip
DECK = (
    SWAP, STREAMED, WHOLE, AGAIN, STREAMED, CANCELLED, KEYED, STREAMED, ADAPTER, MALFORMED,
    SWAP, STREAMED, WHOLE, AGAIN, STREAMED, KEYED, STREAMED, CANCELLED, ADAPTER, STREAMED,
)  # fmt: skip
"""`swap`: streamed, to the competing model that was not asked for longest; `again`: streamed, to
that one once more.
"""
_PROMPTS = ("Say something about winter.", "Where does the ice go when it thaws?", "Count to ten.")
_TOKENS = 12
_CANCELLED_AFTER = 3
_TIMEOUT_S = 120.0


@dataclass
class SentRequest:
    """One request and what became of it.

    Attributes:
        at_s: Seconds since the load began.
        lost: What was wrong with the response, if anything.
    """

    at_s: float
    kind: str
    model: str
    request_id: str = ""
    status: int = 0
    ttft_ms: float | None = None
    duration_ms: float = 0.0
    lost: str | None = None
    cold: bool | None = None

    def document(self) -> dict[str, Any]:
        return asdict(self)


class Load:
    """Sends `rate` requests a second.

    Args:
        on_end: Called with every finished request.
    """

    def __init__(
        self,
        url: str,
        *,
        steady: str,
        adapter: str,
        competing: tuple[str, ...],
        rate: float,
        on_end: Callable[[SentRequest], None],
        deck: tuple[str, ...] = DECK,
    ) -> None:
        self._deck = deck
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(_TIMEOUT_S, connect=10), trust_env=False)
        self._steady, self._adapter, self._competing = steady, adapter, list(competing)
        self._rate, self._on_end = rate, on_end
        self._began = time.monotonic()
        self._answers: dict[tuple[str, str], str] = {}
        self._count = itertools.count()
        self.counts: Counter[str] = Counter()

    async def run(self, seconds: float | None = None, *, requests: int | None = None) -> None:
        """Ask for so long, or so often, then wait for the last answers."""
        deadline = None if seconds is None else time.monotonic() + seconds
        next_at = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                if (requests is not None and number >= requests) or (deadline is not None and next_at >= deadline):
                    break
                await asyncio.sleep(max(0.0, next_at - time.monotonic()))
                group.create_task(self._ask(next(self._count)), name="request")
                next_at += 1 / self._rate

    async def send_next(self) -> SentRequest:
        """Send the next request of the deck and wait for its response."""
        return await self._ask(next(self._count))

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, number: int) -> SentRequest:
        kind = self._deck[number % len(self._deck)]
        sent = SentRequest(time.monotonic() - self._began, kind, self._model(kind))
        prompt = _PROMPTS[number // len(self._deck) % len(_PROMPTS)]
        body = {
            "model": sent.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": _TOKENS, "temperature": 0,
        }  # fmt: skip
        started = time.perf_counter()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._perform(sent, body, number, started)
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError) as e:
            sent.lost = f"{type(e).__name__}: {e}"[:200]
        sent.duration_ms = (time.perf_counter() - started) * 1e3
        self.counts[kind] += 1
        self.counts["lost"] += sent.lost is not None
        self._on_end(sent)
        return sent

    def _model(self, kind: str) -> str:
        if kind == ADAPTER:
            return self._adapter
        if kind == SWAP:
            self._competing.append(self._competing.pop(0))
        return self._competing[-1] if kind in (SWAP, AGAIN) else self._steady

    async def _perform(self, sent: SentRequest, body: dict[str, Any], number: int, started: float) -> None:
        if sent.kind == MALFORMED:
            await self._misuse(sent, body, number // len(self._deck))
        elif sent.kind in (WHOLE, KEYED):
            await self._send_whole(sent, body, f"soak-{self._began}-{number}" if sent.kind == KEYED else None)
        else:
            await self._send_streamed(sent, body, started, stop_after=_CANCELLED_AFTER if sent.kind == CANCELLED else None)

    async def _misuse(self, sent: SentRequest, body: dict[str, Any], turn: int) -> None:
        """Three kinds of bad request, each with the status that it must get."""
        content, expected = (
            (json.dumps(body | {"model": "nobody"}), 404),
            (json.dumps(body | {"max_tokens": -1}), 400),
            ('{"model": "', 400),
        )[turn % 3]
        response = await self._post(sent, content)
        if response.status_code != expected or "error" not in response.json():
            sent.lost = f"{response.status_code} instead of {expected}: {response.text[:100]}"

    async def _send_whole(self, sent: SentRequest, body: dict[str, Any], key: str | None) -> None:
        headers = {} if key is None else {"idempotency-key": key}
        answers = []
        for _ in range(1 if key is None else 2):
            response = await self._post(sent, json.dumps(body), headers)
            if not response.is_success:
                sent.lost = f"{response.status_code}: {response.text[:150]}"
                return
            answers.append(response.json())
        self._compare(sent, body, answers[0]["choices"][0]["message"]["content"])
        if answers[0]["id"] != answers[-1]["id"]:
            sent.lost = "generated twice under one key"

    async def _post(self, sent: SentRequest, content: str, headers: dict[str, str] | None = None) -> httpx.Response:
        response = await self._http.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json", **(headers or {})}
        )
        sent.status, sent.request_id = response.status_code, response.headers.get("x-request-id", "")
        return response

    async def _send_streamed(self, sent: SentRequest, body: dict[str, Any], started: float, stop_after: int | None) -> None:
        text, events, ended = "", 0, False
        async with self._http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            sent.status, sent.request_id = response.status_code, response.headers.get("x-request-id", "")
            if not response.is_success:
                sent.lost = f"{response.status_code}: {(await response.aread())[:150]!r}"
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    break
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    sent.lost = str(chunk["error"])[:200]
                    return
                piece = "".join(c["delta"].get("content") or "" for c in chunk["choices"])
                if piece and sent.ttft_ms is None:
                    sent.ttft_ms = (time.perf_counter() - started) * 1e3
                text += piece
                events += bool(piece)
                if stop_after is not None and events >= stop_after:
                    return
        if not ended:
            sent.lost = "the stream ended without [DONE]"
        self._compare(sent, body, text)

    def _compare(self, sent: SentRequest, body: dict[str, Any], text: str) -> None:
        """Compare a response with the first response of the model to the same prompt.

        A different response counts as different, not as lost.
        """
        first = self._answers.setdefault((body["model"], body["messages"][0]["content"]), text)
        self.counts["different"] += text != first
