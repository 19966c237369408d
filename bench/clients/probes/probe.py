"""Run the probes of one library and print their outcomes as JSON; needs only pydantic.

A probe is a function that uses its library as the library's documentation says. It fails by an
exception. The model has random weights, so probes check the protocol: types, valid JSON by the
schema, finish reasons and usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Case = Literal["chat", "stream", "structured output", "tools: auto", "tools: required", "embeddings", "usage", "error", "responses"]
Function = Callable[[], Coroutine[Any, Any, None] | None]

MODEL = "demo-5m"
UNKNOWN = "no-such-model"
KEY = "none"
HELLO = "Hello, how is the weather?"
TOKENS = 24
"""Tokens of a response without a schema."""
SCHEMA_TOKENS = 400
"""Tokens that suffice for a response by a schema below."""
TIMEOUT_S = 120.0


class Forecast(BaseModel):
    """The weather of some days."""

    model_config = ConfigDict(extra="forbid")
    place: Literal["Bern", "Rome"]
    days: int = Field(ge=1, le=9)
    rain: bool


class NotOffered(Exception):
    """The library cannot do this with a server that is not OpenAI's; the text says why."""


class Probes:
    """The probes of a library, in the order of their definition."""

    def __init__(self) -> None:
        self._probes: list[tuple[Case, str, Function]] = []

    def add(self, case: Case, way: str) -> Callable[[Function], Function]:
        """Return a decorator that adds a probe.

        Args:
            case: What the probe is about.
            way: Which API of the library it uses.
        """

        def decorate(function: Function) -> Function:
            self._probes.append((case, way, function))
            return function

        return decorate

    def run(self) -> None:
        """Run all probes, and print a JSON list of their outcomes as the last line."""
        with asyncio.Runner() as runner:  # one loop: libraries keep connections of the loop that opened them
            rows = [_run(runner, *probe) for probe in self._probes]
        print(json.dumps(rows), flush=True)


def _run(runner: asyncio.Runner, case: Case, way: str, function: Function) -> dict[str, Any]:
    outcome, reason, begun = "passed", "", time.monotonic()
    try:
        if (started := function()) is not None:
            runner.run(started)
    except NotOffered as e:
        outcome, reason = "not offered", str(e)
    except Exception as e:  # any exception is the outcome of a probe
        traceback.print_exc(file=sys.stderr)
        outcome, reason = "failed", f"{type(e).__name__}: {e}"[:500]
    return {"case": case, "way": way, "outcome": outcome, "reason": reason, "seconds": round(time.monotonic() - begun, 2)}


def root() -> str:
    """Return the address of the gateway, the first argument of a probe's process."""
    return sys.argv[1].rstrip("/")


def model_directory() -> str:
    """Return the directory of the demo model, the second argument."""
    return sys.argv[2]


def openai_url() -> str:
    return f"{root()}/v1"


def forecast_tool() -> dict[str, Any]:
    """Return a tool in the form of a chat completion."""
    function = {"name": "forecast", "description": "The weather", "parameters": Forecast.model_json_schema()}
    return {"type": "function", "function": function}


def check(condition: object, found: object) -> None:
    """Fail with what was found."""
    if not condition:
        raise AssertionError(f"found {found!r}"[:400])


@dataclass
class Caught:
    """The error of an `expect_error` block."""

    error: Any = None


@contextlib.contextmanager
def expect_error(*kinds: type[Exception]) -> Iterator[Caught]:
    """Catch one of `kinds` from the block; fail if it raises nothing."""
    caught = Caught()
    try:
        yield caught
    except kinds as e:
        caught.error = e
    else:
        raise AssertionError("no error")


def check_usage(prompt: int | None, completion: int | None, total: int | None = None) -> None:
    """Check that tokens were counted: some of the prompt, and at most as many as were asked for."""
    check(prompt and completion, (prompt, completion, total))
    if total is not None:
        check(total == (prompt or 0) + (completion or 0), (prompt, completion, total))
