"""openai-agents: runs with `OpenAIResponsesModel` (its default) and chat completions."""

from __future__ import annotations

from typing import Any

import openai
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import ModelBehaviorError

from bench.clients.probes.probe import (
    HELLO,
    KEY,
    MODEL,
    SCHEMA_TOKENS,
    TIMEOUT_S,
    TOKENS,
    UNKNOWN,
    Forecast,
    Probes,
    check,
    check_usage,
    expect_error,
    openai_url,
)

probes = Probes()
set_tracing_disabled(True)  # traces go to OpenAI
client = openai.AsyncOpenAI(base_url=openai_url(), api_key=KEY, timeout=TIMEOUT_S, max_retries=0)
calls: list[Forecast] = []


@function_tool  # type: ignore[untyped-decorator]  # the library is not installed here
def forecast(wanted: Forecast) -> str:
    """The weather."""
    calls.append(wanted)
    return "rain"


def chat_model(name: str = MODEL) -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel(name, client)


def responses_model(name: str = MODEL) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(name, client)


def agent(model: Any, tokens: int | None = TOKENS, choice: str | None = None, **options: Any) -> Agent[None]:
    settings = ModelSettings(max_tokens=tokens, tool_choice=choice, include_usage=True)
    return Agent(name="forecaster", instructions="Be brief.", model=model, model_settings=settings, **options)


async def check_text(model: Any, tokens: int | None = TOKENS) -> None:
    answer = await Runner.run(agent(model, tokens), HELLO)
    check(isinstance(answer.final_output, str) and answer.final_output, answer)
    usage = answer.context_wrapper.usage
    check_usage(usage.input_tokens, usage.output_tokens, usage.total_tokens)


async def check_stream(model: Any, tokens: int | None = TOKENS) -> None:
    run = Runner.run_streamed(agent(model, tokens), HELLO)
    kinds = [event.data.type async for event in run.stream_events() if event.type == "raw_response_event"]
    check(kinds.count("response.output_text.delta") > 2 and run.final_output, kinds)


async def check_output(model: Any) -> None:
    answer = await Runner.run(agent(model, SCHEMA_TOKENS, output_type=Forecast), HELLO)
    check(isinstance(answer.final_output, Forecast), answer)


async def check_tool(model: Any) -> None:
    """The first turn must call the tool; the library then resets its choice to auto."""
    calls.clear()
    caller = agent(model, SCHEMA_TOKENS, "required", tools=[forecast])
    try:
        answer = await Runner.run(caller, HELLO, max_turns=2)
        check(answer.final_output is not None, answer)
    except (MaxTurnsExceeded, ModelBehaviorError) as e:
        check(calls, e)
    check(calls, "no call")


async def check_error(model: Any) -> None:
    with expect_error(openai.NotFoundError) as caught:
        await Runner.run(agent(model), HELLO)
    check(caught.error.code == "model_not_found", caught.error.body)


@probes.add("chat", "Runner.run (chat completions)")
async def chat() -> None:
    await check_text(chat_model())


@probes.add("chat", "SQLiteSession: two turns (chat completions)")
async def session() -> None:
    memory = SQLiteSession("probe")
    for text in (HELLO, "More"):
        check((await Runner.run(agent(chat_model()), text, session=memory)).final_output, text)


@probes.add("stream", "Runner.run_streamed (chat completions)")
async def stream() -> None:
    await check_stream(chat_model())


@probes.add("structured output", "output_type (chat completions)")
async def output_type() -> None:
    await check_output(chat_model())


@probes.add("tools: auto", "function_tool (chat completions)")
async def tools_auto() -> None:
    check((await Runner.run(agent(chat_model(), tools=[forecast]), HELLO, max_turns=3)).final_output, "no answer")


@probes.add("tools: required", "function_tool, and its result (chat completions)")
async def tools_required() -> None:
    await check_tool(chat_model())


@probes.add("usage", "usage of a streamed run (chat completions)")
async def usage() -> None:
    run = Runner.run_streamed(agent(chat_model()), HELLO)
    check([event async for event in run.stream_events()], "no events")
    found = run.context_wrapper.usage
    check_usage(found.input_tokens, found.output_tokens, found.total_tokens)


@probes.add("error", "openai.NotFoundError (both APIs)")
async def error() -> None:
    await check_error(chat_model(UNKNOWN))
    await check_error(responses_model(UNKNOWN))


@probes.add("responses", "Runner.run and run_streamed (the default)")
async def responses() -> None:
    # Without a limit: the library raises ModelBehaviorError for a response that is cut.
    await check_text(responses_model(), None)
    await check_stream(responses_model(), None)


@probes.add("responses", "output_type")
async def responses_output() -> None:
    await check_output(responses_model())


@probes.add("responses", "function_tool, and its result")
async def responses_tools() -> None:
    await check_tool(responses_model())


@probes.add("responses", "SQLiteSession and previous_response_id: two turns")
async def responses_session() -> None:
    memory = SQLiteSession("probe-responses")
    for text in (HELLO, "More"):
        last = await Runner.run(agent(responses_model(), None), text, session=memory)
        check(last.final_output, text)
    after = await Runner.run(agent(responses_model(), None), "More", previous_response_id=last.last_response_id)
    check(after.final_output, after)


if __name__ == "__main__":
    probes.run()
