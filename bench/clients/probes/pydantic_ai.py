"""pydantic-ai: agents with `OpenAIChatModel`, `OpenAIResponsesModel` and `AnthropicModel`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, Embedder, ModelHTTPError, ModelSettings, NativeOutput, PromptedOutput, ToolOutput, UsageLimits
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import IncompleteToolCall, UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from bench.clients.probes.probe import (
    HELLO,
    KEY,
    MODEL,
    SCHEMA_TOKENS,
    TIMEOUT_S,
    TOKENS,
    UNKNOWN,
    Forecast,
    NotOffered,
    Probes,
    check,
    check_usage,
    expect_error,
    openai_url,
    root,
)

probes = Probes()


class Narrow(BaseModel):
    """A number that a model of random weights only finds if a grammar holds it to the bounds."""

    number: int = Field(ge=123456, le=123457)


def chat_model(name: str = MODEL) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=openai_url(), api_key=KEY))


def responses_model(name: str = MODEL) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(name, provider=OpenAIProvider(base_url=openai_url(), api_key=KEY))


def anthropic_model(name: str = MODEL) -> AnthropicModel:
    return AnthropicModel(name, provider=AnthropicProvider(base_url=root(), api_key=KEY))


def agent(model: Any, tokens: int = TOKENS, **options: Any) -> Agent[None, Any]:
    return Agent(model, model_settings=ModelSettings(max_tokens=tokens, timeout=TIMEOUT_S), **options)


async def check_text(model: Any) -> None:
    answer = await agent(model, instructions="Be brief.").run(HELLO)
    check(isinstance(answer.output, str) and answer.output, answer)
    usage = answer.usage
    check_usage(usage.input_tokens, usage.output_tokens)


async def check_stream(model: Any) -> None:
    async with agent(model).run_stream(HELLO) as stream:
        parts = [part async for part in stream.stream_text(delta=True, debounce_by=None)]
    check(len(parts) > 2 and "".join(parts), parts)
    check_usage(stream.usage.input_tokens, stream.usage.output_tokens)


async def check_output(model: Any, output: Any) -> None:
    answer = await agent(model, SCHEMA_TOKENS, output_type=output).run(HELLO)
    check(isinstance(answer.output, Forecast), answer)


async def check_error(make: Callable[[str], Any]) -> None:
    with expect_error(ModelHTTPError) as caught:
        await agent(make(UNKNOWN)).run(HELLO)
    check(caught.error.status_code == 404 and UNKNOWN in str(caught.error.body), caught.error)


@probes.add("chat", "Agent.run with OpenAIChatModel")
async def chat() -> None:
    await check_text(chat_model())


@probes.add("chat", "Agent.run with AnthropicModel")
async def chat_anthropic() -> None:
    await check_text(anthropic_model())


@probes.add("stream", "run_stream with OpenAIChatModel")
async def stream() -> None:
    await check_stream(chat_model())


@probes.add("stream", "run_stream with AnthropicModel")
async def stream_anthropic() -> None:
    await check_stream(anthropic_model())


@probes.add("structured output", "NativeOutput (json_schema)")
async def native_output() -> None:
    await check_output(chat_model(), NativeOutput(Forecast))


@probes.add("structured output", "ToolOutput (tool_choice required)")
async def tool_output() -> None:
    await check_output(chat_model(), ToolOutput(Forecast))


@probes.add("structured output", "PromptedOutput (the model may fail)")
async def prompted_output() -> None:
    # JSON of another form is expected: nothing holds the model to the schema.
    with contextlib.suppress(UnexpectedModelBehavior, IncompleteToolCall):
        await check_output(chat_model(), PromptedOutput(Forecast))


@probes.add("structured output", "a stream of partial outputs")
async def output_stream() -> None:
    async with agent(chat_model(), SCHEMA_TOKENS, output_type=NativeOutput(Forecast)).run_stream(HELLO) as found:
        outputs = [output async for output in found.stream_output(debounce_by=None)]
    check(isinstance(outputs[-1], Forecast), outputs)


@probes.add("tools: auto", "a function tool, beside text")
async def tools_auto() -> None:
    def forecast(wanted: Forecast) -> str:
        """The weather."""
        return "rain"

    answer = await agent(chat_model(), tools=[forecast]).run(HELLO, usage_limits=UsageLimits(request_limit=3))
    check(answer.output, answer)


@probes.add("tools: required", "a function tool, and an output tool (OpenAIChatModel)")
async def tools_required() -> None:
    await check_tool_choice(chat_model())


@probes.add("tools: required", "a function tool, and an output tool (AnthropicModel)")
async def tools_anthropic() -> None:
    await check_tool_choice(anthropic_model(), strict=None)


@probes.add("tools: required", "ToolOutput(strict=True) with bounds (AnthropicModel)")
async def tools_anthropic_strict() -> None:
    try:
        await agent(anthropic_model(), SCHEMA_TOKENS, output_type=ToolOutput(Narrow, strict=True)).run(HELLO)
    except UnexpectedModelBehavior as e:
        raise NotOffered("moves minimum and maximum of strict tools into descriptions, where no grammar enforces them") from e


async def check_tool_choice(model: Any, strict: bool | None = True) -> None:
    """Run until the output tool is called; other calls are answered, and the run continues."""
    calls: list[Forecast] = []

    def forecast(wanted: Forecast) -> str:
        """The weather."""
        calls.append(wanted)
        return "rain"

    caller = agent(model, SCHEMA_TOKENS, tools=[forecast], output_type=ToolOutput(Forecast, strict=strict))
    try:
        answer = await caller.run(HELLO, usage_limits=UsageLimits(request_limit=8))
    except UsageLimitExceeded:
        check(len(calls) > 1, calls)
    else:
        check(isinstance(answer.output, Forecast), answer)


@probes.add("embeddings", "Embedder with OpenAIEmbeddingModel")
async def embeddings() -> None:
    model = OpenAIEmbeddingModel(MODEL, provider=OpenAIProvider(base_url=openai_url(), api_key=KEY))
    found = await Embedder(model).embed_documents(["one", "two"])
    check(len(found.embeddings) == 2 and len(found.embeddings[0]) > 1 and found.usage.input_tokens, found)


@probes.add("usage", "usage of a run and of a stream")
async def usage() -> None:
    await check_text(chat_model())
    await check_stream(chat_model())


@probes.add("error", "ModelHTTPError (OpenAIChatModel)")
async def error() -> None:
    await check_error(chat_model)


@probes.add("error", "ModelHTTPError (OpenAIResponsesModel, AnthropicModel)")
async def error_others() -> None:
    await check_error(responses_model)
    await check_error(anthropic_model)


@probes.add("responses", "Agent.run with OpenAIResponsesModel, and a stream")
async def responses() -> None:
    await check_text(responses_model())
    await check_stream(responses_model())


@probes.add("responses", "NativeOutput and ToolOutput")
async def responses_output() -> None:
    await check_output(responses_model(), NativeOutput(Forecast))
    await check_output(responses_model(), ToolOutput(Forecast))


@probes.add("responses", "a function tool, and an output tool")
async def responses_tools() -> None:
    await check_tool_choice(responses_model())


if __name__ == "__main__":
    probes.run()
