"""litellm: `completion`, `embedding` and `responses`, by four of its providers."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices come from the package, not from the internet

import litellm

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
    forecast_tool,
    openai_url,
    root,
)

probes = Probes()
MESSAGES = [{"role": "user", "content": HELLO}]
ADDRESSES = {"openai": openai_url, "hosted_vllm": openai_url, "ollama_chat": root, "anthropic": root}


def ask(provider: str = "openai", model: str = MODEL, **options: Any) -> Any:
    asked = {"max_tokens": TOKENS, "messages": MESSAGES, "timeout": TIMEOUT_S, "num_retries": 0} | options
    return litellm.completion(model=f"{provider}/{model}", api_base=ADDRESSES[provider](), api_key=KEY, **asked)


def check_answer(answer: Any) -> None:
    choice = answer.choices[0]
    check(choice.message.content and choice.finish_reason in ("stop", "length"), answer)
    check_usage(answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)


def check_stream(chunks: list[Any]) -> None:
    check(len(chunks) > 2 and "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks)


def check_calls(answer: Any) -> None:
    calls = answer.choices[0].message.tool_calls
    check(calls and answer.choices[0].finish_reason == "tool_calls", answer)
    check(calls[0].function.name == "forecast", calls)
    Forecast.model_validate_json(calls[0].function.arguments)


@probes.add("chat", "completion (openai/)")
def chat() -> None:
    check_answer(ask())


@probes.add("chat", "completion (hosted_vllm/)")
def chat_vllm() -> None:
    check_answer(ask("hosted_vllm"))


@probes.add("chat", "completion (ollama_chat/)")
def chat_ollama() -> None:
    check_answer(ask("ollama_chat"))


@probes.add("chat", "completion (anthropic/)")
def chat_anthropic() -> None:
    check_answer(ask("anthropic"))


@probes.add("chat", "acompletion and text_completion")
async def chat_others() -> None:
    asked = {"api_base": openai_url(), "api_key": KEY, "max_tokens": TOKENS, "timeout": TIMEOUT_S}
    check_answer(await litellm.acompletion(model=f"openai/{MODEL}", messages=MESSAGES, **asked))
    text = await litellm.atext_completion(model=f"text-completion-openai/{MODEL}", prompt=HELLO, **asked)
    check(text.choices[0].text, text)


@probes.add("stream", "completion (openai/, hosted_vllm/)")
def stream() -> None:
    check_stream(list(ask(stream=True)))
    check_stream(list(ask("hosted_vllm", stream=True)))


@probes.add("stream", "completion (ollama_chat/)")
def stream_ollama() -> None:
    check_stream(list(ask("ollama_chat", stream=True)))


@probes.add("stream", "completion (anthropic/)")
def stream_anthropic() -> None:
    check_stream(list(ask("anthropic", stream=True)))


@probes.add("usage", "stream_options.include_usage")
def usage() -> None:
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    found = [c.usage for c in chunks if getattr(c, "usage", None)]
    check(len(found) == 1, chunks[-1])
    check_usage(found[0].prompt_tokens, found[0].completion_tokens, found[0].total_tokens)


@probes.add("structured output", "response_format=a pydantic model (openai/)")
def schema() -> None:
    answer = ask(max_tokens=SCHEMA_TOKENS, response_format=Forecast)
    Forecast.model_validate_json(answer.choices[0].message.content)


@probes.add("structured output", "response_format=a pydantic model (hosted_vllm/)")
def schema_vllm() -> None:
    answer = ask("hosted_vllm", max_tokens=SCHEMA_TOKENS, response_format=Forecast)
    Forecast.model_validate_json(answer.choices[0].message.content)


@probes.add("structured output", "response_format=a pydantic model (ollama_chat/)")
def schema_ollama() -> None:
    answer = ask("ollama_chat", max_tokens=SCHEMA_TOKENS, response_format=Forecast)
    Forecast.model_validate_json(answer.choices[0].message.content)


@probes.add("structured output", "response_format=a pydantic model (anthropic/)")
def schema_anthropic() -> None:
    answer = ask("anthropic", max_tokens=SCHEMA_TOKENS, response_format=Forecast)
    Forecast.model_validate_json(answer.choices[0].message.content)


@probes.add("tools: auto", "completion with tools (openai/, hosted_vllm/)")
def tools_auto() -> None:
    for provider in ("openai", "hosted_vllm"):
        check(ask(provider, tools=[forecast_tool()], tool_choice="auto").choices[0].message, "no message")


@probes.add("tools: auto", "completion with tools (ollama_chat/)")
def tools_ollama() -> None:
    check(ask("ollama_chat", tools=[forecast_tool()]).choices[0].message, "no message")


@probes.add("tools: required", "tool_choice (openai/, hosted_vllm/)")
def tools_required() -> None:
    named = {"type": "function", "function": {"name": "forecast"}}
    asked: dict[str, Any] = {"tools": [forecast_tool()], "max_tokens": SCHEMA_TOKENS, "parallel_tool_calls": False}
    check_calls(ask(tool_choice="required", **asked))
    check_calls(ask(tool_choice=named, **asked))
    check_calls(ask("hosted_vllm", tool_choice="required", **asked))


@probes.add("tools: required", "tool_choice, as a stream (openai/)")
def tools_stream() -> None:
    asked: dict[str, Any] = {"tools": [forecast_tool()], "max_tokens": SCHEMA_TOKENS, "parallel_tool_calls": False}
    check_calls(litellm.stream_chunk_builder(list(ask(tool_choice="required", stream=True, **asked)), messages=MESSAGES))


@probes.add("tools: required", "tool_choice, and the call's result (anthropic/)")
def tools_anthropic() -> None:
    asked: dict[str, Any] = {"tools": [forecast_tool()], "max_tokens": SCHEMA_TOKENS}
    answer = ask("anthropic", tool_choice="required", **asked)
    calls = answer.choices[0].message.tool_calls
    check(calls and json.loads(calls[0].function.arguments), answer)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    check(ask("anthropic", messages=[*MESSAGES, answer.choices[0].message, *results], tools=[forecast_tool()]).choices, "none")


@probes.add("embeddings", "embedding (openai/, hosted_vllm/)")
def embeddings() -> None:
    for provider in ("openai", "hosted_vllm"):
        found = litellm.embedding(model=f"{provider}/{MODEL}", input=["one", "two"], api_base=openai_url(), api_key=KEY)
        check(len(found.data) == 2 and found.data[0]["embedding"] and found.usage.prompt_tokens, found)


@probes.add("embeddings", "embedding (ollama/)")
def embeddings_ollama() -> None:
    found = litellm.embedding(model=f"ollama/{MODEL}", input=["one", "two"], api_base=root())
    check(len(found.data) == 2 and found.data[0]["embedding"], found)


@probes.add("error", "litellm.NotFoundError (openai/, hosted_vllm/, anthropic/)")
def error() -> None:
    for provider in ("openai", "hosted_vllm", "anthropic"):
        try:
            ask(provider, UNKNOWN)
        except litellm.NotFoundError as e:
            check(UNKNOWN in str(e), e)
        else:
            raise AssertionError(f"no error of {provider}")


@probes.add("error", "an exception of litellm (ollama_chat/)")
def error_ollama() -> None:
    with expect_error(litellm.NotFoundError, litellm.APIConnectionError) as caught:
        ask("ollama_chat", UNKNOWN)
    check(UNKNOWN in str(caught.error), caught.error)


@probes.add("responses", "responses (openai/), a stream, the next response")
def responses() -> None:
    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": openai_url(), "api_key": KEY, "max_output_tokens": TOKENS}
    whole = litellm.responses(input=HELLO, **asked)
    check(whole.output and whole.usage.input_tokens, whole)
    events = [event.type for event in litellm.responses(input=HELLO, stream=True, **asked)]
    check(str(getattr(events[-1], "value", events[-1])) in ("response.completed", "response.incomplete"), events)
    after = litellm.responses(input="More", previous_response_id=whole.id, **asked)
    check(after.output, after)


@probes.add("responses", "responses (openai/) with a tool")
def responses_tool() -> None:
    tool = {"type": "function", "name": "forecast", "parameters": Forecast.model_json_schema(), "strict": True}
    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": openai_url(), "api_key": KEY, "tools": [tool]}
    found = litellm.responses(input=HELLO, tool_choice="required", max_output_tokens=SCHEMA_TOKENS, **asked)
    calls = [item for item in found.output if item.type == "function_call"]
    check(calls, found)
    Forecast.model_validate_json(calls[0].arguments)


if __name__ == "__main__":
    probes.run()
