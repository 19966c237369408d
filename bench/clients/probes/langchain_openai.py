"""langchain-openai: `ChatOpenAI` and `OpenAIEmbeddings`."""

from __future__ import annotations

import contextlib
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

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


def llm(tokens: int = TOKENS, **options: Any) -> ChatOpenAI:
    asked = {"model": MODEL, "max_tokens": tokens, "timeout": TIMEOUT_S, "max_retries": 0} | options
    return ChatOpenAI(base_url=openai_url(), api_key=KEY, **asked)


@tool(args_schema=Forecast)  # type: ignore[untyped-decorator]  # the library is not installed here
def forecast(place: str, days: int, rain: bool) -> str:
    """The weather."""
    return "rain"


@probes.add("chat", "ChatOpenAI.invoke")
def chat() -> None:
    answer = llm().invoke([("system", "Be brief."), ("user", HELLO)])
    check(isinstance(answer.content, str) and answer.content, answer)
    check(answer.response_metadata["finish_reason"] in ("stop", "length"), answer.response_metadata)


@probes.add("chat", "ChatOpenAI.abatch")
async def batch() -> None:
    answers = await llm().abatch([HELLO, "Good morning"])
    check(len(answers) == 2 and all(a.content for a in answers), answers)


@probes.add("stream", "ChatOpenAI.stream")
def stream() -> None:
    chunks = list(llm().stream(HELLO))
    check(len(chunks) > 2 and "".join(str(c.content) for c in chunks), chunks)


@probes.add("stream", "ChatOpenAI.astream_events")
async def stream_events() -> None:
    names = [event["event"] async for event in llm().astream_events(HELLO)]
    check(names.count("on_chat_model_stream") > 2, names)


@probes.add("usage", "usage_metadata of invoke")
def usage() -> None:
    found = llm().invoke(HELLO).usage_metadata
    check(found, found)
    check_usage(found["input_tokens"], found["output_tokens"], found["total_tokens"])


@probes.add("usage", "usage_metadata of a stream (stream_usage)")
def stream_usage() -> None:
    found = [c.usage_metadata for c in llm(stream_usage=True).stream(HELLO) if c.usage_metadata]
    check(len(found) == 1, found)
    check_usage(found[0]["input_tokens"], found[0]["output_tokens"], found[0]["total_tokens"])


@probes.add("structured output", "with_structured_output (json_schema)")
def json_schema() -> None:
    found = llm(SCHEMA_TOKENS).with_structured_output(Forecast).invoke(HELLO)
    check(isinstance(found, Forecast), found)


@probes.add("structured output", "with_structured_output (function_calling)")
def function_calling() -> None:
    found = llm(SCHEMA_TOKENS).with_structured_output(Forecast, method="function_calling").invoke(HELLO)
    check(isinstance(found, Forecast), found)


@probes.add("structured output", "with_structured_output of a JSON schema, as a stream")
def json_schema_stream() -> None:
    schema = {"title": "forecast"} | Forecast.model_json_schema()
    last = list(llm(SCHEMA_TOKENS).with_structured_output(schema, method="json_schema", strict=True).stream(HELLO))[-1]
    Forecast.model_validate(last)


@probes.add("structured output", "with_structured_output (json_mode)")
def json_mode() -> None:
    asked = llm().with_structured_output(Forecast, method="json_mode", include_raw=True)
    with contextlib.suppress(openai.LengthFinishReasonError):  # any object is allowed, also one without an end
        check(set(asked.invoke(HELLO)) == {"raw", "parsed", "parsing_error"}, "no answer")


@probes.add("tools: auto", "bind_tools")
def tools_auto() -> None:
    answer = llm().bind_tools([forecast]).invoke(HELLO)
    check(isinstance(answer, AIMessage) and (answer.content or answer.tool_calls), answer)


@probes.add("tools: auto", "results of calls (ToolMessage)")
def tool_results() -> None:
    called = llm(SCHEMA_TOKENS).bind_tools([forecast], tool_choice="required", strict=True).invoke(HELLO)
    results = [ToolMessage("rain", tool_call_id=call["id"]) for call in called.tool_calls]
    answer = llm().bind_tools([forecast]).invoke([HumanMessage(HELLO), called, *results])
    check(answer.response_metadata["finish_reason"] in ("stop", "length", "tool_calls"), answer)


@probes.add("tools: required", "bind_tools (tool_choice)")
def tools_required() -> None:
    for choice in ("required", "any", "forecast"):
        bound = llm(SCHEMA_TOKENS).bind_tools([forecast], tool_choice=choice, strict=True, parallel_tool_calls=False)
        answer = bound.invoke(HELLO)
        check(len(answer.tool_calls) == 1 and answer.response_metadata["finish_reason"] == "tool_calls", answer)
        Forecast.model_validate(answer.tool_calls[0]["args"])


@probes.add("tools: required", "bind_tools, as a stream")
def tools_stream() -> None:
    bound = llm(SCHEMA_TOKENS).bind_tools([forecast], tool_choice="required", strict=True, parallel_tool_calls=False)
    chunks = list(bound.stream(HELLO))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    Forecast.model_validate(whole.tool_calls[0]["args"])


@probes.add("embeddings", "OpenAIEmbeddings (check_embedding_ctx_length=False)")
def embeddings() -> None:
    embedder = OpenAIEmbeddings(
        model=MODEL, base_url=openai_url(), api_key=KEY, check_embedding_ctx_length=False, timeout=TIMEOUT_S
    )
    vectors = embedder.embed_documents(["one", "two"])
    check(len(vectors) == 2 and len(vectors[0]) == len(embedder.embed_query("one")) > 1, vectors)


@probes.add("error", "openai.NotFoundError")
def error() -> None:
    with expect_error(openai.NotFoundError) as caught:
        llm(model=UNKNOWN).invoke(HELLO)
    check(caught.error.code == "model_not_found", caught.error.body)


@probes.add("responses", "ChatOpenAI(use_responses_api=True)")
def responses() -> None:
    answer = llm(use_responses_api=True).invoke(HELLO)
    check(answer.text and answer.usage_metadata, answer)
    check(answer.response_metadata["id"].startswith("resp_"), answer.response_metadata)


@probes.add("responses", "a stream, a schema and a tool of the Responses API")
def responses_more() -> None:
    chunks = list(llm(use_responses_api=True).stream(HELLO))
    check("".join(str(c.text) for c in chunks), chunks)
    model = llm(SCHEMA_TOKENS, use_responses_api=True)
    check(isinstance(model.with_structured_output(Forecast).invoke(HELLO), Forecast), "not parsed")
    answer = model.bind_tools([forecast], tool_choice="required", strict=True, parallel_tool_calls=False).invoke(HELLO)
    Forecast.model_validate(answer.tool_calls[0]["args"])


if __name__ == "__main__":
    probes.run()
