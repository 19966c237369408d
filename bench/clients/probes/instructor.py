"""instructor: pydantic models from the openai client, in its modes."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from instructor import Mode

from bench.clients.probes.probe import (
    HELLO,
    KEY,
    MODEL,
    SCHEMA_TOKENS,
    TIMEOUT_S,
    UNKNOWN,
    Forecast,
    NotOffered,
    Probes,
    check,
    check_usage,
    expect_error,
    openai_url,
)

probes = Probes()
MESSAGES: list[Any] = [{"role": "user", "content": HELLO}]


def client(mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=openai_url(), api_key=KEY, timeout=TIMEOUT_S, max_retries=0), mode=mode)


def ask(mode: Mode, model: str = MODEL, **options: Any) -> Any:
    asked: dict[str, Any] = {"response_model": Forecast, "messages": MESSAGES, "max_tokens": SCHEMA_TOKENS, "max_retries": 1}
    return client(mode).create(model=model, **asked | options)


@probes.add("chat", "create without a response model")
def chat() -> None:
    answer = client(Mode.TOOLS).create(model=MODEL, messages=MESSAGES, max_tokens=24, response_model=None)
    check(answer.choices[0].message.content, answer)


@probes.add("stream", "create_partial (JSON_SCHEMA, TOOLS)")
def stream() -> None:
    for mode in (Mode.JSON_SCHEMA, Mode.TOOLS):
        parts = list(client(mode).create_partial(model=MODEL, messages=MESSAGES, max_tokens=SCHEMA_TOKENS, response_model=Forecast))
        Forecast.model_validate(parts[-1].model_dump())


@probes.add("structured output", "Mode.JSON_SCHEMA")
def json_schema() -> None:
    check(isinstance(ask(Mode.JSON_SCHEMA), Forecast), "not parsed")


@probes.add("structured output", "Mode.TOOLS, TOOLS_STRICT")
def tools() -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT):
        check(isinstance(ask(mode), Forecast), "not parsed")


@probes.add("tools: required", "Mode.PARALLEL_TOOLS")
def parallel_tools() -> None:
    raise NotOffered("Mode.PARALLEL_TOOLS asks with tool_choice auto: whether a tool is called is the model's choice")


@probes.add("tools: required", "Mode.TOOLS (a named function)")
def named_tool() -> None:
    found, raw = client(Mode.TOOLS).create_with_completion(
        model=MODEL, messages=MESSAGES, max_tokens=SCHEMA_TOKENS, response_model=Forecast
    )
    check(isinstance(found, Forecast) and raw.choices[0].message.tool_calls[0].function.name == "Forecast", raw)


@probes.add("usage", "create_with_completion")
def usage() -> None:
    _, raw = client(Mode.JSON_SCHEMA).create_with_completion(
        model=MODEL, messages=MESSAGES, max_tokens=SCHEMA_TOKENS, response_model=Forecast
    )
    check_usage(raw.usage.prompt_tokens, raw.usage.completion_tokens, raw.usage.total_tokens)


@probes.add("error", "InstructorRetryException of openai.NotFoundError")
def error() -> None:
    with expect_error(Exception) as caught:  # the library wraps OpenAI's error
        ask(Mode.JSON_SCHEMA, UNKNOWN)
    causes = [caught.error, caught.error.__cause__, caught.error.__context__]
    check("model_not_found" in str(caught.error) or any(isinstance(c, openai.NotFoundError) for c in causes), caught.error)


@probes.add("responses", "Mode.RESPONSES_TOOLS")
def responses() -> None:
    check(isinstance(ask(Mode.RESPONSES_TOOLS), Forecast), "not parsed")


if __name__ == "__main__":
    probes.run()
