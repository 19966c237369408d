"""llama-index: `OpenAILike`, `OpenAILikeResponses` and `OpenAILikeEmbedding`."""

from __future__ import annotations

from typing import Any

import openai
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

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
)

probes = Probes()
MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=HELLO)]


def llm(tokens: int = TOKENS, **options: Any) -> OpenAILike:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "is_chat_model": True, "timeout": TIMEOUT_S, "max_retries": 0}
    return OpenAILike(api_base=openai_url(), api_key=KEY, **asked | options)


def tool() -> FunctionTool:
    def forecast(place: str, days: int, rain: bool) -> str:
        """The weather."""
        return "rain"

    return FunctionTool.from_defaults(forecast, fn_schema=Forecast)


@probes.add("chat", "OpenAILike.chat, achat, complete")
async def chat() -> None:
    for answer in (llm().chat(MESSAGES), await llm().achat(MESSAGES)):
        check(answer.message.content and answer.raw.choices[0].finish_reason in ("stop", "length"), answer)
    check(llm().complete(HELLO).text, "no text")
    check(llm(is_chat_model=False).complete(HELLO).text, "no text")


@probes.add("chat", "OpenAI (the class for OpenAI's own models)")
def chat_openai() -> None:
    try:
        OpenAI(model=MODEL, api_base=openai_url(), api_key=KEY).metadata  # noqa: B018  # it looks up the context window
    except ValueError as e:
        raise NotOffered("refuses every model name that is not OpenAI's; OpenAILike is for other servers") from e


@probes.add("stream", "OpenAILike.stream_chat, astream_chat")
async def stream() -> None:
    parts = [part.delta for part in llm().stream_chat(MESSAGES)]
    check(len(parts) > 2 and "".join(p or "" for p in parts), parts)
    parts = [part.delta async for part in await llm().astream_chat(MESSAGES)]
    check(len(parts) > 2 and "".join(p or "" for p in parts), parts)


@probes.add("usage", "additional_kwargs, and a stream's last chunk")
def usage() -> None:
    found = llm().chat(MESSAGES).raw.usage
    check_usage(found.prompt_tokens, found.completion_tokens, found.total_tokens)
    streamed = llm(additional_kwargs={"stream_options": {"include_usage": True}}).stream_chat(MESSAGES)
    usages = [part.raw.usage for part in streamed if getattr(part.raw, "usage", None)]
    check(len(usages) == 1 and usages[0].completion_tokens, usages)


@probes.add("structured output", "as_structured_llm (json_schema)")
def json_schema() -> None:
    model = llm(SCHEMA_TOKENS, should_use_structured_outputs=True)
    check(isinstance(model.as_structured_llm(Forecast).chat(MESSAGES).raw, Forecast), "not parsed")


@probes.add("structured output", "as_structured_llm (function calling)")
def function_calling() -> None:
    model = llm(SCHEMA_TOKENS, is_function_calling_model=True)
    check(isinstance(model.as_structured_llm(Forecast).chat(MESSAGES).raw, Forecast), "not parsed")


@probes.add("tools: auto", "chat_with_tools")
def tools_auto() -> None:
    answer = llm(is_function_calling_model=True).chat_with_tools([tool()], HELLO)
    check(answer.message.content or answer.message.additional_kwargs.get("tool_calls"), answer)


@probes.add("tools: auto", "FunctionAgent")
async def function_agent() -> None:
    agent = FunctionAgent(tools=[tool()], llm=llm(is_function_calling_model=True), system_prompt="Be brief.")
    check(str(await agent.run(HELLO)), "no answer")


@probes.add("tools: required", "chat_with_tools (tool_required), and the call's result")
def tools_required() -> None:
    model = llm(SCHEMA_TOKENS, is_function_calling_model=True, strict=True)
    answer = model.chat_with_tools([tool()], HELLO, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = model.get_tool_calls_from_response(answer)
    Forecast.model_validate(call.tool_kwargs)
    result = ChatMessage(role="tool", content="rain", additional_kwargs={"tool_call_id": call.tool_id})
    check(model.chat_with_tools([tool()], chat_history=[*MESSAGES, answer.message, result]).message, "no answer")


@probes.add("tools: required", "stream_chat_with_tools (tool_required)")
def tools_stream() -> None:
    model = llm(SCHEMA_TOKENS, is_function_calling_model=True, strict=True)
    parts = list(model.stream_chat_with_tools([tool()], HELLO, tool_required=True, allow_parallel_tool_calls=False))
    (call,) = model.get_tool_calls_from_response(parts[-1])
    Forecast.model_validate(call.tool_kwargs)


@probes.add("embeddings", "OpenAILikeEmbedding")
def embeddings() -> None:
    embedder = OpenAILikeEmbedding(model_name=MODEL, api_base=openai_url(), api_key=KEY, timeout=TIMEOUT_S)
    vectors = embedder.get_text_embedding_batch(["one", "two"])
    check(len(vectors) == 2 and len(vectors[0]) == len(embedder.get_query_embedding("one")) > 1, vectors)


@probes.add("error", "openai.NotFoundError")
def error() -> None:
    with expect_error(openai.NotFoundError) as caught:
        llm(model=UNKNOWN).chat(MESSAGES)
    check(caught.error.code == "model_not_found", caught.error.body)


@probes.add("responses", "OpenAILikeResponses.chat, stream_chat")
def responses() -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": TOKENS, "timeout": TIMEOUT_S, "max_retries": 0}
    model = OpenAILikeResponses(api_base=openai_url(), api_key=KEY, is_chat_model=True, context_window=2048, **asked)
    check(model.chat(MESSAGES).message.content, "no answer")
    parts = [part.delta for part in model.stream_chat(MESSAGES)]
    check("".join(p or "" for p in parts), parts)


@probes.add("responses", "OpenAILikeResponses.chat_with_tools (tool_required)")
def responses_tools() -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": SCHEMA_TOKENS, "timeout": TIMEOUT_S, "max_retries": 0}
    asked |= {"is_function_calling_model": True, "strict": True, "context_window": 2048, "is_chat_model": True}
    model = OpenAILikeResponses(api_base=openai_url(), api_key=KEY, **asked)
    answer = model.chat_with_tools([tool()], HELLO, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = model.get_tool_calls_from_response(answer)
    Forecast.model_validate(call.tool_kwargs)


if __name__ == "__main__":
    probes.run()
