"""Another host resumes text completions of a server like llama-server.

It resumes from their tokens; some responses do not report all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.contracts import subjects
from shared.contracts.inference import RESUME, InferData, InferFailed, InferResponse
from shared.contracts.migration import ListRequests, PrepareResume, ReadTokens, RequestsListed, ResumePrepared, TokensRead
from shared.errors import Conflict, NotFound
from tests.support.fake_tokens import prompt_of
from tests.support.hosted import MIB, Hosts, fake_program, hosted_card, resume_of, resumes_from_any_message

PLAIN = "Where does the ice go? 1 < 2, STO and on. "
TORN = "Where does \u6771\u4eac go? 1 < 2, STO. "
"""A character of several tokens, of which only the last is reported."""
BEFORE = len("Where does ")


@pytest.fixture
async def instance(hosts: Hosts, tmp_path: Path) -> str:
    source = tmp_path / "m.gguf"
    source.touch()
    start = hosts.host(
        hosted_card(source, "llamacpp", memory=MIB, context=256), THAW_LLAMACPP_SERVER=fake_program(tmp_path, "llamacpp")
    )
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    return start.instance_id


def asked(says: str, **more: Any) -> dict[str, Any]:
    return {"stream": True, "temperature": 0, "max_tokens": 200, "prompt": "Hello", "fake": {"says": says}, **more}


@pytest.mark.parametrize("says", [PLAIN, TORN])
@pytest.mark.parametrize("more", [{}, {"stop": ["STOP", "2, STO"]}, {"max_tokens": 17}])
async def test_cut_anywhere_and_resumed(hosts: Hosts, instance: str, says: str, more: dict[str, Any]) -> None:
    body = asked(says, **more)
    undisturbed = await hosts.request(instance, "completion", **body)
    head = undisturbed.stream.replies[0]
    assert isinstance(head, InferResponse)
    assert (head.fixed, head.prompt_tokens) == ("", 6)
    assert "__verbose" not in undisturbed.body.decode()
    await resumes_from_any_message(hosts, instance, "completion", undisturbed, body)


async def test_read_and_prepared_as_any(hosts: Hosts, instance: str) -> None:
    control = subjects.engine_control(instance)
    stream = await hosts.ask(instance, "completion", **asked(PLAIN * 5, fake={"says": PLAIN * 5, "pace": 0.1}))
    await stream.until(lambda r: sum(isinstance(x, InferData) for x in r) > 4)
    read = await hosts.mesh.request(control, ReadTokens(request_id=stream.request_id), TokensRead)
    assert read.prompt_token_ids == (tuple(prompt_of({"prompt": "Hello"})),)
    assert bytes(read.choices[0].token_ids) == PLAIN.encode()[: len(read.choices[0].token_ids)]
    sequence = (*read.prompt_token_ids[0], *read.choices[0].token_ids)
    ahead = PrepareResume(prepared="m", revision="r1", sequences=(sequence,))
    assert (await hosts.mesh.request(control, ahead, ResumePrepared)).tokens == len(sequence)


async def test_a_response_with_missing_tokens_is_not_moved(hosts: Hosts, instance: str) -> None:
    """A response with missing tokens is not migrated.

    If its engine dies, it resumes from the last known token; a sampled response cannot resume.
    """
    control = subjects.engine_control(instance)
    stream = await hosts.ask(instance, "completion", **asked(TORN, fake={"says": TORN * 5, "pace": 0.1}))
    await stream.until(lambda r: len("".join(d.text for x in r if isinstance(x, InferData) for d in x.progress)) > BEFORE + 1)
    (running,) = (await hosts.mesh.request(control, ListRequests(), RequestsListed)).requests
    assert "did not report all" in running.fixed
    with pytest.raises(NotFound):
        await hosts.mesh.request(control, ReadTokens(request_id=stream.request_id), TokensRead)
    resume = resume_of(stream.replies)
    assert len(resume.choices[0].token_ids) == BEFORE
    drawn = await hosts.ask(instance, "completion", resume=resume, **asked(TORN, temperature=0.8))
    failed = (await drawn.until(bool))[0]
    assert isinstance(failed, InferFailed)
    assert (failed.error.code, failed.error.param) == (Conflict.code, RESUME)
    assert "not all of its tokens" in failed.error.message


async def test_chats_of_llama_server_are_not_resumable(hosts: Hosts, instance: str) -> None:
    body = {"stream": True, "messages": [{"role": "user", "content": "Hello"}], "fake": {"tokens": 3}}
    answer = await hosts.request(instance, "chat", **body)
    head = answer.stream.replies[0]
    assert isinstance(head, InferResponse)
    assert "not of chats" in head.fixed
    assert answer.text() == "t0 t1 t2 "
