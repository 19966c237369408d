"""Generate the load: clients with the plain `openai` package and its own retries.

Each client sends one request after another.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai

from bench.chaos.verdict import Answer, Exchange, Job, Reference

PROMPTS = ("Where does the ice go?", "Tell me of the river, the sea and the rain.", "Count to ten, slowly.")
TIMEOUT_S = 180.0
CALLERS = ("team-0", "team-1")
"""API keys of the clients, in turn. Their limits and budgets are never reached: no fault may make a
gateway refuse them.
"""
PROBE = "probe"
"""API key of requests beside the clients, without limits."""
WasStruck = Callable[[str | None, float], bool]
"""Whether a gateway (by name; None: any) has been struck since a time."""
_THINK_S = (0.05, 0.6)
_KEYED, _STREAMED, _SAMPLED, _TWINS = 0.35, 0.6, 0.3, 0.4
"""Shares: requests with a key; streamed ones; of those with a key, sampled ones, and those sent
twice at the same time.
"""


@dataclass(frozen=True)
class Served:
    """A model that clients ask for.

    Attributes:
        tokens: Numbers of tokens, of which a request asks for one.
        resumes: Its streams survive their engine.
    """

    name: str
    weight: float
    tokens: tuple[int, ...]
    engine: str = "builtin"
    resumes: bool = True
    near_ties: bool = False


def jobs(served: tuple[Served, ...], seed: int, client: int) -> Iterator[Job]:
    """Yield the requests of one client, without end; the same for the same seed."""
    random_ = random.Random(f"{seed}-{client}")
    number = 0
    while True:
        number += 1
        model = random_.choices(served, [s.weight for s in served])[0]
        keyed, stream = random_.random() < _KEYED, random_.random() < _STREAMED
        # A stream of such an engine ends with an error event when its engine dies
        # (docs/engines.md).
        stream = stream and model.resumes
        sampled = keyed and random_.random() < _SAMPLED
        yield Job(
            number=number,
            model=model.name,
            prompt=random_.choice(PROMPTS),
            tokens=random_.choice(model.tokens),
            stream=stream,
            key=f"chaos-{seed}-{client}-{number}-{random_.getrandbits(32):08x}" if keyed else None,
            temperature=1.0 if sampled else 0.0,
            engine=model.engine,
            caller=caller_of(client),
        )


def caller_of(client: int) -> str:
    """Return the name of a client's API key."""
    return CALLERS[client % len(CALLERS)]


def secret_of(caller: str) -> str:
    """Return the API key with a name."""
    return f"sk-chaos-{caller}"


class Asker:
    """One `openai` client of an API key.

    Args:
        gateway_of: Returns the gateway that serves a connection, by the client's port.
        on_status: Receives the status of every response.
    """

    def __init__(self, url: str, caller: str, gateway_of: Callable[[int], str | None]) -> None:
        self._gateway_of = gateway_of
        self.statuses: list[int] = []
        http = openai.DefaultHttpxClient(event_hooks={"response": [lambda r: self.statuses.append(r.status_code)]}, trust_env=False)
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=secret_of(caller), timeout=TIMEOUT_S, http_client=http)

    def close(self) -> None:
        self._client.close()

    def ask(self, job: Job) -> Answer:
        """Never raises."""
        headers = {"Idempotency-Key": job.key} if job.key else {}
        try:
            if job.stream:
                return self._stream(self._create(job, headers, stream=True, stream_options={"include_usage": True}))
            answer = self._create(job, headers)
        except Exception as e:
            return Answer(error=_describe(e), disconnected=isinstance(e, openai.APIConnectionError))
        (choice,) = answer.choices
        tokens = answer.usage.completion_tokens if answer.usage else 0
        return Answer(choice.message.content or "", choice.finish_reason, tokens, answer.id)

    def reference(self, job: Job, *, gaps: bool) -> Reference:
        """The undisturbed answer. Raises whatever the client raises."""
        more: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if gaps else {}
        answer = self._create(job, {}, **more)
        (choice,) = answer.choices
        plain = Answer(choice.message.content or "", choice.finish_reason, answer.usage.completion_tokens, answer.id)
        if not gaps or choice.logprobs is None or not choice.logprobs.content:
            return Reference(plain)
        ends: list[int] = []
        found: list[float] = []
        for token in choice.logprobs.content:
            ends.append((ends[-1] if ends else 0) + len(token.token))
            best, second = sorted((t.logprob for t in token.top_logprobs[:2]), reverse=True)
            found.append(best - second)
        return Reference(plain, tuple(ends), tuple(found))

    def _create(self, job: Job, headers: dict[str, str], **more: Any) -> Any:
        own = {"ignore_eos": True} if job.engine == "builtin" else {}
        return self._client.chat.completions.create(
            model=job.model,
            messages=[{"role": "user", "content": job.prompt}],
            max_tokens=job.tokens,
            temperature=job.temperature,
            extra_headers=headers,
            extra_body=own,
            **more,
        )

    def _stream(self, stream: Any) -> Answer:
        text: list[str] = []
        finish, tokens, ids = None, 0, set[str]()
        address = stream.response.extensions["network_stream"].get_extra_info("client_addr")
        gateway = self._gateway_of(address[1]) if address else None
        try:
            for chunk in stream:
                ids.add(chunk.id)
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    text.append(choice.delta.content or "")
                    finish = choice.finish_reason or finish
        except openai.APIError as e:
            disconnected = isinstance(e, openai.APIConnectionError)
            return Answer("".join(text), finish, tokens, error=_describe(e), gateway=gateway, disconnected=disconnected)
        except Exception as e:  # the transport's own error: the connection broke
            return Answer("".join(text), finish, tokens, error=_describe(e), gateway=gateway, disconnected=True)
        return Answer("".join(text), finish, tokens, "+".join(sorted(ids)), gateway=gateway)


def _describe(error: Exception) -> str:
    cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else ""
    return f"{type(error).__name__}: {error}{cause}"[:400]


class Client(threading.Thread):
    """Sends its jobs until `stopped`.

    Args:
        struck: Returns whether a gateway (by name; None: any) has been struck since a time.
    """

    def __init__(
        self,
        number: int,
        url: str,
        work: Iterator[Job],
        gateway_of: Callable[[int], str | None],
        struck: WasStruck,
        done: Callable[[Exchange], None],
    ) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.current: Exchange | None = None
        self._work = work
        self._struck = struck
        self._done = done
        caller = caller_of(number)
        self._asker, self._twin = Asker(url, caller, gateway_of), Asker(url, caller, gateway_of)
        self._random = random.Random(number)
        self._stopped = threading.Event()
        self.running = threading.Event()
        self.running.set()
        self.idle = threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        self.running.set()

    def run(self) -> None:
        for job in self._work:
            if not self.running.is_set():
                self.idle.set()
                self.running.wait()
                self.idle.clear()
            if self._stopped.is_set():
                break
            self.current = Exchange(job, time.monotonic())
            self._exchange(self.current)
            self._done(self.current)
            self.current = None
            self._stopped.wait(self._random.uniform(*_THINK_S))
        self.idle.set()
        self._asker.close()
        self._twin.close()

    def _exchange(self, exchange: Exchange) -> None:
        job = exchange.job
        twin = self._begin_twin(exchange) if job.key and self._random.random() < _TWINS else None
        exchange.answer = self._ask(exchange, self._asker)
        exchange.ended = time.monotonic()
        if twin is not None:
            twin.join()
        elif job.key and exchange.answer.error is None:
            exchange.repeats.append(self._ask(exchange, self._twin))
        statuses = [*self._asker.statuses, *self._twin.statuses]
        self._asker.statuses.clear()
        self._twin.statuses.clear()
        exchange.statuses = [s for s in statuses if s >= 400]
        exchange.server_errors = sum(s >= 500 for s in statuses)

    def _begin_twin(self, exchange: Exchange) -> threading.Thread:
        """The same key and body at the same time, over another connection."""
        twin = threading.Thread(target=lambda: exchange.repeats.append(self._ask(exchange, self._twin)), daemon=True)
        twin.start()
        return twin

    def _ask(self, exchange: Exchange, asker: Asker) -> Answer:
        return retry_deferred(exchange, asker, self._struck)


def retry_deferred(exchange: Exchange, asker: Asker, struck: WasStruck) -> Answer:
    """Retry a request whose connection broke together with its gateway.

    A stream is retried at once, a whole response after the package's retries.
    """
    while True:
        begun = time.monotonic()
        answer = asker.ask(exchange.job)
        if not answer.disconnected:
            return answer
        if not struck(answer.gateway, begun):
            exchange.broken = f"{answer.error} at {answer.gateway}"
            return answer
        exchange.cuts += 1
