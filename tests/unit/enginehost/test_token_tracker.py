"""Tracking a stream's tokens, and responses that cannot be tracked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.enginehost.drivers.token_api import LlamaServerTokens, VllmTokens
from services.enginehost.server.token_tracker import ResumeState, TokenTracker, not_resumable_request_reason


def event(**more: Any) -> bytes:
    return b"data: " + json.dumps(more).encode() + b"\n\n"


VLLM, LLAMA = VllmTokens(), LlamaServerTokens()
HEAD = {"id": "a", "created": 1, "model": "m", "object": "text_completion"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"stream": False}, "not streamed"),
        ({"tools": [{}]}, "tools"),
        ({"n": 2}, "n:"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"guided_json": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_untrackable_request_has_a_reason(body: dict[str, Any], why: str) -> None:
    assert why in not_resumable_request_reason("completion", {"stream": True, "prompt": "x", **body}, {}, VLLM)


def test_trackable_request_has_no_reason() -> None:
    plain = {"stream": True, "prompt": [1, 2], "n": 1, "presence_penalty": 0, "response_format": {"type": "text"}, "tools": []}
    assert not_resumable_request_reason("completion", plain, {}, VLLM) == ""
    assert not_resumable_request_reason("completion", {**plain, "response_format": {"type": "text"}}, {}, VLLM) == ""
    assert "grammar" in not_resumable_request_reason("completion", {**plain, "response_format": "json"}, {}, VLLM)
    chat: dict[str, Any] = {"stream": True, "messages": [{"role": "user", "content": "x"}]}
    assert not_resumable_request_reason("chat", chat, {}, VLLM) == ""
    assert "reasoning" in not_resumable_request_reason("chat", chat, {"reasoning_parser": "qwen3"}, VLLM)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "plain text" in not_resumable_request_reason("chat", {**chat, "messages": image}, {}, VLLM)
    assert not_resumable_request_reason("embedding", chat, {}, VLLM)


def test_events_may_arrive_in_any_pieces() -> None:
    stream = (
        event(**HEAD, choices=[{"index": 0, "text": "\u00fc", "token_ids": [5], "prompt_token_ids": [1, 2]}])
        + event(**HEAD, choices=[{"index": 0, "text": "b", "token_ids": [6, 7], "finish_reason": "stop"}])
        + event(**HEAD, choices=[], usage={"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5})
        + b"data: [DONE]\n\n"
    )
    whole = TokenTracker(VLLM, chat=False, hide_usage=True, hide_ids=True)
    at_once, all_deltas = whole.feed(stream)
    for size in (1, 3, 50):
        tracker = TokenTracker(VLLM, chat=False, hide_usage=True, hide_ids=True)
        pieces = [tracker.feed(stream[i : i + size]) for i in range(0, len(stream), size)]
        assert b"".join(data for data, _ in pieces) == at_once
        assert [d for _, deltas in pieces for d in deltas] == all_deltas
        assert tracker.finish() == b""
    assert b"token_ids" not in at_once
    assert b"usage" not in at_once
    assert at_once.endswith(b"data: [DONE]\n\n")
    assert (whole.prompt, whole.tokens, whole.finish_reason, whole.head["id"]) == ((1, 2), [5, 6, 7], "stop", "a")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 3)


def test_requested_usage_and_token_ids_are_kept() -> None:
    reported = event(**HEAD, choices=[{"index": 0, "text": "a", "token_ids": [5]}]) + event(
        **HEAD, choices=[], usage={"prompt_tokens": 1}
    )
    data, _ = TokenTracker(VLLM, chat=False, hide_usage=False, hide_ids=False).feed(reported)
    assert b'"token_ids":[5]' in data
    assert b"usage" in data


def test_other_events_are_forwarded_unchanged() -> None:
    for other in (b": comment\n\n", b'data: {"error": {"message": "x"}}\n\n', b"data: {broken\n\n", b"event: x\ndata: {}\n\n"):
        assert TokenTracker(VLLM, chat=True, hide_usage=True, hide_ids=True).feed(other) == (other, [])


def test_role_event_starts_the_response() -> None:
    """A role alone begins a response.

    An engine may die before its first token: the client already has the role, which must not be
    repeated.
    """
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    tracker = TokenTracker(VLLM, chat=True, hide_usage=True, hide_ids=True)
    _, deltas = tracker.feed(event(**HEAD, choices=[role], prompt_token_ids=[1, 2]))
    assert [(d.index, d.text, d.token_ids) for d in deltas] == [(0, "", ())]
    assert tracker.feed(event(**HEAD, choices=[{"index": 0, "delta": {"content": ""}}]))[1] == []


def test_resumed_response_keeps_its_format_and_counts() -> None:
    begun = ResumeState({"id": "first", "created": 7}, prompt_tokens=4, tokens=3, kept=2, skip_chars=2, chat=True)
    tracker = TokenTracker(VLLM, chat=True, hide_usage=False, hide_ids=True, resume_state=begun)
    stream = (
        event(**HEAD, choices=[{"index": 0, "text": "\u00e9", "token_ids": [9], "prompt_token_ids": [1, 2, 3, 4, 5, 6]}])
        + event(**HEAD, choices=[{"index": 0, "text": "xyz", "token_ids": [10], "finish_reason": "length"}])
        + event(**HEAD, choices=[], usage={"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8})
    )
    data, deltas = tracker.feed(stream)
    events = [json.loads(e[6:]) for e in data.split(b"\n\n") if e]
    assert [e["choices"][0]["delta"]["content"] for e in events if e["choices"]] == ["yz"]
    assert {(e["id"], e["created"]) for e in events} == {("first", 7)}
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[-1]["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    assert [(d.text, d.token_ids, d.finish_reason) for d in deltas] == [("yz", (10,), "length")]
    assert tracker.answer == (5, 6, 9, 10)


def generated(text: str, tokens: list[int], made: int, **more: Any) -> bytes:
    verbose = {"content": text, "tokens": tokens, "tokens_predicted": made}
    return event(**HEAD, choices=[{"index": 0, "text": text, **more}], __verbose=verbose)


def test_token_ids_of_llama_server() -> None:
    tracker = TokenTracker(LLAMA, chat=False, hide_usage=False, hide_ids=True, prompt=(1, 2))
    out, deltas = tracker.feed(generated("a", [5], 1) + generated("b", [6], 2) + generated("", [], 2, finish_reason="length"))
    assert b"__verbose" not in out
    assert [d.token_ids for d in deltas] == [(5,), (6,), ()]
    assert (tracker.tokens, tracker.lost, tracker.finish_reason, tracker.prompt_tokens) == ([5, 6], False, "length", 2)
    shown = TokenTracker(LLAMA, chat=False, hide_usage=False, hide_ids=False, prompt=(1,))
    assert b"__verbose" in shown.feed(generated("a", [5], 1))[0]


def test_tokens_after_a_missing_one_are_not_tracked() -> None:
    tracker = TokenTracker(LLAMA, chat=False, hide_usage=False, hide_ids=True, prompt=(1, 2))
    _, deltas = tracker.feed(generated("a", [5], 1) + generated("\u00fc", [7], 3) + generated("b", [8], 4))
    assert tracker.lost
    assert [(d.text, d.token_ids) for d in deltas] == [("a", (5,)), ("\u00fc", ()), ("b", ())]
    assert tracker.prompt == (1, 2)


def test_a_llama_server_without_token_ids() -> None:
    tracker = TokenTracker(LLAMA, chat=False, hide_usage=False, hide_ids=True, prompt=(1, 2))
    tracker.feed(event(**HEAD, choices=[{"index": 0, "text": "a"}]))
    assert tracker.prompt == ()


def test_chats_and_grammars_of_llama_server_are_not_resumable() -> None:
    plain = {"stream": True, "prompt": "x"}
    assert not_resumable_request_reason("completion", plain, {}, LLAMA) == ""
    assert "chats" in not_resumable_request_reason("chat", {"stream": True, "messages": []}, {}, LLAMA)
    assert "grammar" in not_resumable_request_reason("completion", {**plain, "grammar": "root ::= x"}, {}, LLAMA)


def test_requested_token_ids_are_sent_once_after_a_resume() -> None:
    """A client that requested token ids gets each once.

    Two tokens are generated again: their text was held back when the first part ended.
    """
    begun = ResumeState({"id": "first"}, prompt_tokens=2, tokens=4, kept=2, skip_chars=1, chat=False)
    tracker = TokenTracker(VLLM, chat=False, hide_usage=False, hide_ids=False, resume_state=begun)
    out, deltas = tracker.feed(
        event(**HEAD, choices=[{"index": 0, "text": "c", "token_ids": [7], "prompt_token_ids": [1, 2, 5, 6]}])
        + event(**HEAD, choices=[{"index": 0, "text": "de", "token_ids": [8, 9]}])
    )
    reported = [json.loads(e[6:]) for e in out.split(b"\n\n") if e]
    assert [t for e in reported for t in e["choices"][0]["token_ids"]] == [9]
    assert b"prompt_token_ids" not in out
    assert [d.token_ids for d in deltas][-1] == (9,)
    assert tracker.answer == (5, 6, 7, 8, 9)


@pytest.mark.parametrize("hide_ids", [True, False])
def test_tokens_in_place_of_others_are_reported_to_the_gateway(hide_ids: bool) -> None:
    begun = ResumeState({"id": "first"}, prompt_tokens=2, tokens=4, kept=2, skip_chars=1, chat=False, replaces_tokens=True)
    tracker = TokenTracker(VLLM, chat=False, hide_usage=False, hide_ids=hide_ids, resume_state=begun)
    out, deltas = tracker.feed(
        event(**HEAD, choices=[{"index": 0, "text": "c", "token_ids": [7], "prompt_token_ids": [1, 2, 5, 6]}])
        + event(**HEAD, choices=[{"index": 0, "text": "de", "token_ids": [8, 9]}])
    )
    reported = [json.loads(e[6:])["choices"][0] for e in out.split(b"\n\n") if e]
    assert [t for choice in reported for t in choice.get("token_ids", ())] == ([] if hide_ids else [9])
    assert [(d.text, d.token_ids) for d in deltas] == [("", (7,)), ("de", (8, 9))]
    assert tracker.answer == (5, 6, 7, 8, 9)


def test_cached_tokens_of_the_response_are_not_counted_for_the_prompt() -> None:
    begun = ResumeState({"id": "first"}, prompt_tokens=2, tokens=2, kept=2, skip_chars=0, chat=False)
    tracker = TokenTracker(VLLM, chat=False, hide_usage=False, hide_ids=True, resume_state=begun)
    counted = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
    out, _ = tracker.feed(event(**HEAD, choices=[], usage=counted))
    usage = json.loads(out[6:])["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 3, 5)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert tracker.usage.cached_tokens == 2


def test_text_before_the_generated_text_is_sent_once() -> None:
    begun = ResumeState({"id": "first"}, prompt_tokens=2, tokens=2, kept=2, skip_chars=0, chat=True, lead="nd")
    tracker = TokenTracker(VLLM, chat=True, hide_usage=False, hide_ids=True, resume_state=begun)
    out, deltas = tracker.feed(
        event(**HEAD, choices=[{"index": 0, "text": "", "token_ids": [7]}])
        + event(**HEAD, choices=[{"index": 0, "text": ".", "token_ids": [8], "finish_reason": "stop"}])
    )
    events = [json.loads(e[6:]) for e in out.split(b"\n\n") if e]
    assert [e["choices"][0]["delta"]["content"] for e in events] == ["nd", "."]
    assert [(d.text, d.token_ids) for d in deltas] == [("nd", (7,)), (".", (8,))]
