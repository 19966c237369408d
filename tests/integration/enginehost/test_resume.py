"""Another host resumes interrupted responses of an engine like vLLM.

The result equals the undisturbed response.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.enginehost.drivers.vllm import LAST_PRIORITY
from services.gateway.requests.resume_state import ResumeState
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import EngineReport, PingEngine
from shared.contracts.inference import (
    RESUME,
    FairShare,
    InferData,
    InferEnd,
    InferFailed,
    InferReply,
    InferResponse,
    InferYielded,
    Resume,
    ResumedChoice,
)
from shared.contracts.migration import (
    ForgetResume,
    ListRequests,
    PrepareResume,
    ReadTokens,
    RequestsListed,
    ResumePrepared,
    TokensRead,
    YieldInfer,
)
from shared.errors import Conflict, NotFound
from tests.support.fake_tokens import prompt_of
from tests.support.hosted import (
    MIB,
    Hosts,
    bytes_of,
    fake_program,
    hosted_card,
    resume_of,
    resumes_from_any_message,
    text_and_events,
)

SAYS = "Gr\u00fc\u00dfe an \U0001f30d\U0001f30d! 1 < 2, STO und \u6771\u4eac. "
HELLO = [{"role": "user", "content": "Hello"}]


async def ready(hosts: Hosts, directory: Path, **options: Any) -> str:
    directory.mkdir(exist_ok=True)
    card = hosted_card("engine://demo", "vllm", memory=MIB, context=256, **options)
    start = hosts.host(card, THAW_VLLM_PYTHON=fake_program(directory, "vllm"))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    return start.instance_id


def asked(endpoint: str, **more: Any) -> dict[str, Any]:
    prompt = {"messages": HELLO} if endpoint == "chat" else {"prompt": "Hello"}
    return {"stream": True, "temperature": 0, "max_tokens": 200, "fake": {"says": SAYS}, **prompt, **more}


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
@pytest.mark.parametrize(
    "more", [{}, {"stop": ["STOP", "2, STO und"]}, {"max_tokens": 17, "stream_options": {"include_usage": True}}]
)
async def test_cut_anywhere_and_resumed(hosts: Hosts, tmp_path: Path, endpoint: Any, more: dict[str, Any]) -> None:
    instance = await ready(hosts, tmp_path)
    body = asked(endpoint, **more)
    undisturbed = await hosts.request(instance, endpoint, **body)
    text, _ = text_and_events(undisturbed.body)
    assert text in SAYS or text.rstrip("\ufffd") in SAYS
    head = undisturbed.stream.replies[0]
    assert isinstance(head, InferResponse)
    assert (head.fixed, head.prompt_tokens) == ("", 6)
    assert "token_ids" not in undisturbed.body.decode()
    await resumes_from_any_message(hosts, instance, endpoint, undisturbed, body)


async def test_sampled_response_is_resumed_twice(hosts: Hosts, tmp_path: Path) -> None:
    """A sampling engine generates another token in place of one whose text was held back."""
    instance = await ready(hosts, tmp_path)
    state, text = ResumeState(), ""
    for says, shown in (("Gr\u00fcn", "Gr"), ("Graue Maus", "aue"), ("Graue Maus", " Maus")):
        fields = state.resume_fields("", keeps_partial_output=True)
        resume = Resume.model_validate(fields) if fields is not None else None
        state.attempt_started()
        fake = {"says": says, "hold": {"tokens": 3, "file": str(tmp_path / "never")} if shown != " Maus" else {}}
        stream = await hosts.ask(instance, "completion", resume=resume, **asked("completion", temperature=0.7, fake=fake))
        replies = await stream.until(partial(_has_received, len(shown)))
        for reply in replies:
            if isinstance(reply, InferResponse):
                state.response_started(reply, "r1")
            elif isinstance(reply, InferData):
                state.add([delta.model_dump() for delta in reply.progress])
        text += _text_of(replies)
        await hosts.cancel(instance, stream.request_id)
    assert text == "Graue Maus"
    calls = (await hosts.request_route(instance, "/stats", "GET")).json["calls"]
    prompts = [bytes(body["prompt"]) for _, path, body in calls if path == "/v1/completions" and isinstance(body["prompt"], list)]
    prompt = bytes(prompt_of({"prompt": "Hello"}))
    assert prompts == [prompt + b"Gr", prompt + b"Graue"]


def _text_of(replies: Sequence[InferReply]) -> str:
    return "".join(d.text for r in replies if isinstance(r, InferData) for d in r.progress)


def _has_received(chars: int, replies: Sequence[InferReply]) -> bool:
    """True after so many characters, and three tokens."""
    tokens = sum(len(d.token_ids) for r in replies if isinstance(r, InferData) for d in r.progress)
    return len(_text_of(replies)) >= chars and tokens >= 3


async def test_resumed_tokens_are_not_counted_as_generated(hosts: Hosts, tmp_path: Path) -> None:
    instance, may_continue = await ready(hosts, tmp_path), tmp_path / "may continue"
    body = asked("completion", max_tokens=12, fake={"says": SAYS, "hold": {"tokens": 4, "file": str(may_continue)}})
    stream = await hosts.ask(instance, "completion", **body)
    replies = await stream.until(lambda r: any(d.token_ids for x in r if isinstance(x, InferData) for d in x.progress))
    resume = resume_of(replies)
    kept = len(resume.choices[0].token_ids)
    may_continue.touch()
    await stream.until(lambda r: isinstance(r[-1], InferEnd))
    rest = await hosts.ask(instance, "completion", resume=resume, **body)
    await rest.until(lambda r: bool(r) and isinstance(r[-1], InferEnd | InferFailed))
    report = await hosts.reported(instance, lambda r: r.load.completed == 2)
    assert 12 < report.load.generated_tokens <= 24 - kept + 3, "up to three are made again: half a character"


async def test_a_request_is_read_and_yielded(hosts: Hosts, tmp_path: Path) -> None:
    instance = await ready(hosts, tmp_path)
    control = subjects.engine_control(instance)
    hold = {"tokens": 9, "file": str(tmp_path / "never")}
    stream = await hosts.ask(instance, "chat", **asked("chat", fake={"says": SAYS * 20, "hold": hold}))
    await stream.until(lambda r: sum(len(d.token_ids) for x in r if isinstance(x, InferData) for d in x.progress) == 9)
    listed = (await hosts.mesh.request(control, ListRequests(), RequestsListed)).requests
    assert [(r.request_id, r.fixed, r.prompt_tokens) for r in listed] == [(stream.request_id, "", 6)]
    assert listed[0].tokens_per_second > 0
    read = await hosts.mesh.request(control, ReadTokens(request_id=stream.request_id), TokensRead)
    assert read.prompt_token_ids == (tuple(prompt_of({"messages": HELLO})),)
    assert bytes(read.choices[0].token_ids) == (SAYS * 20).encode()[: len(read.choices[0].token_ids)]
    await hosts.mesh.request(control, YieldInfer(request_id=stream.request_id), Done)
    replies = await stream.until(lambda r: isinstance(r[-1], InferYielded))
    assert len(resume_of(replies).choices[0].token_ids) >= len(read.choices[0].token_ids)
    with pytest.raises(NotFound):
        await hosts.mesh.request(control, YieldInfer(request_id=stream.request_id), Done)
    await hosts.reported(instance, lambda r: r.load.active == 0)
    assert stream.replies[-1] == replies[-1]


async def test_prepare_fills_the_engines_prefix_cache(hosts: Hosts, tmp_path: Path) -> None:
    instance = await ready(hosts, tmp_path)
    control = subjects.engine_control(instance)
    tokens = tuple(prompt_of({"messages": HELLO}))
    first = PrepareResume(prepared="m", revision="r1", sequences=(tokens,), caused_by="p-1")
    assert (await hosts.mesh.request(control, first, ResumePrepared)).tokens == len(tokens)
    longer = first.model_copy(update={"sequences": ((*tokens, 65, 66),)})
    assert (await hosts.mesh.request(control, longer, ResumePrepared)).tokens == 2
    # A published report may be of the time while the second one is computed.
    load = (await hosts.mesh.request(control, PingEngine(), EngineReport)).load
    calls = (await hosts.request_route(instance, "/stats", "GET")).json["calls"]
    asked = [body for _, path, body in calls if path == "/v1/completions" and body.get("priority") == LAST_PRIORITY]
    assert [bytes(body["prompt"]) for body in asked] == [bytes(tokens), bytes((*tokens, 65, 66))], "after all others"
    assert [w.plan_id for w in load.background] == ["p-1"]
    assert sum(w.seconds for w in load.background) == pytest.approx(load.busy_s, abs=1e-4)
    await hosts.mesh.request(control, ForgetResume(prepared="m"), Done)
    with pytest.raises(Conflict, match="r2"):
        await hosts.mesh.request(control, first.model_copy(update={"revision": "r2"}), ResumePrepared)


async def test_preparation_computes_only_missing_tokens_in_chunks(hosts: Hosts, tmp_path: Path) -> None:
    instance = await ready(hosts, tmp_path, engine_args={"scheduling_policy": "fcfs"})
    control = subjects.engine_control(instance)
    for length in (1200, 1300, 2000):
        order = PrepareResume(prepared="m", revision="r1", sequences=(tuple(range(65, 70)) * (length // 5),))
        await hosts.mesh.request(control, order, ResumePrepared)
    calls = (await hosts.request_route(instance, "/stats", "GET")).json["calls"]
    asked = [body for _, path, body in calls if path == "/v1/completions" and isinstance(body["prompt"], list)]
    assert [len(body["prompt"]) for body in asked] == [512, 1024, 1200, 1300, 1812, 2000]
    assert not any("priority" in body for body in asked), "its operator configured no priorities"


async def test_preparation_is_answered_in_time_and_continued_by_a_repeated_order(hosts: Hosts, tmp_path: Path) -> None:
    """A migrator cuts long rounds, so that it learns their speed before a deadline."""
    instance = await ready(hosts, tmp_path, engine_args={"scheduling_policy": "fcfs"})
    control = subjects.engine_control(instance)
    order = PrepareResume(prepared="m", revision="r1", sequences=(tuple(range(65, 70)) * 1000,), within_ms=1)
    found = [await hosts.mesh.request(control, order, ResumePrepared)]
    while found[-1].left:
        found.append(await hosts.mesh.request(control, order, ResumePrepared))
    assert len(found) > 1, "ten pieces take more than a millisecond"
    assert sum(x.tokens for x in found) == 5000
    calls = (await hosts.request_route(instance, "/stats", "GET")).json["calls"]
    asked = [body for _, path, body in calls if path == "/v1/completions" and isinstance(body["prompt"], list)]
    assert [len(body["prompt"]) for body in asked] == [*range(512, 5000, 512), 5000]


async def test_client_priority_is_refused_unless_vllm_is_configured_for_it(hosts: Hosts, tmp_path: Path) -> None:
    instance = await ready(hosts, tmp_path)
    error = (await hosts.request(instance, "chat", messages=HELLO, priority=-1)).error
    assert error is not None
    assert (error.code, error.param) == ("unsupported_parameter", "priority")
    assert "scheduling_policy" in error.message
    granted = await ready(hosts, tmp_path / "granted", engine_args={"scheduling_policy": "priority"})
    assert (await hosts.request(granted, "chat", messages=HELLO, priority=-1)).status == 200


async def test_the_priority_of_a_request_is_that_of_vllm(hosts: Hosts, tmp_path: Path) -> None:
    instance = await ready(hosts, tmp_path)
    for priority in (5, -5, 0):
        stream = await hosts.ask(instance, "chat", share=FairShare(flow="a", priority=priority), **asked("chat"))
        await stream.until(lambda r: bool(r) and isinstance(r[-1], InferEnd))
    calls = (await hosts.request_route(instance, "/stats", "GET")).json["calls"]
    assert [body.get("priority") for _, path, body in calls if path == "/v1/chat/completions"] == [-5, 5, None]


@pytest.mark.parametrize(
    ("change", "more", "why"),
    [
        ({"revision": "r2"}, {}, "revision"),
        ({"prompt_tokens": 7}, {}, "6 tokens here"),
        ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"choices": (ResumedChoice(), ResumedChoice(index=1))}, {}, "one unfinished choice"),
    ],
)
async def test_response_that_cannot_be_resumed_is_refused(
    hosts: Hosts, tmp_path: Path, change: dict[str, Any], more: dict[str, Any], why: str
) -> None:
    instance = await ready(hosts, tmp_path)
    resume = Resume(revision="r1", choices=(ResumedChoice(token_ids=(71,), text_chars=1),), prompt_tokens=6)
    stream = await hosts.ask(instance, "chat", resume=resume.model_copy(update=change), **asked("chat", **more))
    failed = (await stream.until(bool))[0]
    assert isinstance(failed, InferFailed)
    assert (failed.error.code, failed.error.param) == (Conflict.code, RESUME)
    assert why in failed.error.message


async def test_responses_that_cannot_be_resumed_report_the_reason(hosts: Hosts, tmp_path: Path) -> None:
    instance = await ready(hosts, tmp_path)
    for more, why in (
        ({"n": 2}, "n:"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):
        body = asked("chat", **more)
        del body["fake"]
        answer = await hosts.request(instance, "chat", **body, fake={"tokens": 3})
        head = answer.stream.replies[0]
        assert isinstance(head, InferResponse)
        assert head.fixed.startswith(why)
        assert answer.text() == "t0 t1 t2 "


async def test_response_is_resumed_if_the_core_of_its_vllm_ends(hosts: Hosts, tmp_path: Path) -> None:
    """vLLM's server outlives its core, and ends the stream with an error event."""
    instance, other = await ready(hosts, tmp_path), await ready(hosts, tmp_path)
    fake = {"says": SAYS, "fails_after": 9, "loses_core": True}
    stream = await hosts.ask(instance, "chat", **asked("chat", fake=fake))
    replies = await stream.until(lambda r: bool(r) and isinstance(r[-1], InferEnd | InferFailed))
    failed = replies[-1]
    assert isinstance(failed, InferFailed)
    assert (failed.error.code, failed.engine_lost) == ("engine_failed", True)
    text, events = text_and_events(bytes_of(replies))
    assert text
    assert not any("error" in event for event in events)
    report = await hosts.reported(instance, lambda r: r.state == "failed")
    assert report.error is not None
    assert "status 503" in report.error.message
    rest = await hosts.ask(other, "chat", resume=resume_of(replies), **asked("chat"))
    await rest.until(lambda r: bool(r) and isinstance(r[-1], InferEnd | InferFailed))
    assert text + text_and_events(bytes_of(rest.replies))[0] == SAYS


async def test_error_event_of_a_healthy_engine_reaches_the_client(hosts: Hosts, tmp_path: Path) -> None:
    instance = await ready(hosts, tmp_path)
    answer = await hosts.request(instance, "chat", **asked("chat", fake={"says": SAYS, "fails_after": 9}))
    assert answer.error is None
    assert answer.events()[-1]["error"]["code"] == 500
    assert (await hosts.request(instance, "chat", messages=HELLO, max_tokens=2)).status == 200
