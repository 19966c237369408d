"""Responses of real vLLM and llama-server that stop in the middle are resumed.

Tokens equal those of undisturbed responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shared.contracts import subjects
from shared.contracts.inference import InferEnd, InferFailed, InferReply, InferResponse, Resume
from shared.contracts.migration import PrepareResume, ResumePrepared
from shared.messaging import Mesh
from tests.integration.engines_real.conftest import PATIENCE_S, RealEngine, listening
from tests.support.hosted import HostedAnswer, Hosts, bytes_of, resume_of, text_and_events
from tests.support.servers import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S)]
HELLO = [{"role": "user", "content": "Where does the ice go?"}]
CUTS = (1, 20, 37)
"""Tokens of the part that an engine has sent, of 40."""


async def cut(
    hosts: Hosts, instance: str, endpoint: Any, body: dict[str, Any], replies: Sequence[InferReply]
) -> list[tuple[bytes, Resume]]:
    """Return what was sent before each cut of a response, and the response's state there.

    A whole response cannot be cut at a chosen token: on a busy machine a message has many. So most
    parts are responses that end there. The last part is of `replies`, between two messages, if
    these have some of the tokens each.
    """
    parts = []
    for tokens in CUTS:
        begun = await hosts.request(instance, endpoint, **{**body, "max_tokens": tokens})
        state = resume_of(begun.stream.replies)
        assert len(state.choices[0].token_ids) == tokens
        continued = state.choices[0].model_copy(update={"finish_reason": None})
        parts.append((begun.body, state.model_copy(update={"choices": (continued,)})))
    inner = [n for n in range(1, len(replies)) if 0 < len(resume_of(replies[:n]).choices[0].token_ids) < 40]
    if inner:
        sent = replies[: inner[len(inner) // 2]]
        parts.append((bytes_of(sent), resume_of(sent)))
    return parts


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
async def test_cut_anywhere_and_resumed(mesh: Mesh, nats_server: NatsServer, vllm: RealEngine, endpoint: Any) -> None:
    hosts = await listening(mesh, nats_server.url, vllm)
    prompt: dict[str, Any] = {"messages": HELLO} if endpoint == "chat" else {"prompt": "Where does the ice go?"}
    body = {**prompt, "stream": True, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    undisturbed = await hosts.request(vllm.instance, endpoint, **body)
    replies = undisturbed.stream.replies
    whole = resume_of(replies)
    assert len(whole.choices[0].token_ids) == 40
    assert undisturbed.usage is not None
    assert undisturbed.usage.completion_tokens == 40
    for number, (sent, resume) in enumerate(await cut(hosts, vllm.instance, endpoint, body, replies)):
        if number == 1:
            sequence = (*range(3, 3 + resume.prompt_tokens), *resume.choices[0].token_ids)
            ahead = PrepareResume(prepared=endpoint, revision="r1", sequences=(sequence,))
            assert (await mesh.request(subjects.engine_control(vllm.instance), ahead, ResumePrepared)).tokens == len(sequence)
        rest = await hosts.ask(vllm.instance, endpoint, resume=resume, **body)
        await rest.until(lambda r: bool(r) and isinstance(r[-1], InferEnd | InferFailed))
        again = HostedAnswer(rest)
        got = resume.choices[0].token_ids + resume_of(rest.replies).choices[0].token_ids
        assert got == whole.choices[0].token_ids, len(resume.choices[0].token_ids)
        assert text_and_events(sent + again.body)[0] == text_and_events(undisturbed.body)[0]
        assert again.usage == undisturbed.usage


@pytest.mark.parametrize("prompt", ["Where does the ice go?", "n\u00e9 \u65e5\u672c caf\u00e9"])
async def test_llama_servers_completions_are_resumed(
    mesh: Mesh, nats_server: NatsServer, own_server: RealEngine, torn: list[int], prompt: str
) -> None:
    hosts = await listening(mesh, nats_server.url, own_server)
    body: dict[str, Any] = {"prompt": prompt, "stream": True, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    body["logit_bias"] = [[token, False] for token in torn]
    undisturbed = await hosts.request(own_server.instance, "completion", **body)
    replies = undisturbed.stream.replies
    head = replies[0]
    assert isinstance(head, InferResponse)
    assert head.fixed == ""
    assert undisturbed.usage is not None
    assert undisturbed.usage.completion_tokens == 40
    whole = resume_of(replies)
    assert len(whole.choices[0].token_ids) == 40, "each token was reported"
    for sent, resume in await cut(hosts, own_server.instance, "completion", body, replies):
        rest = await hosts.ask(own_server.instance, "completion", resume=resume, **body)
        await rest.until(lambda r: bool(r) and isinstance(r[-1], InferEnd | InferFailed))
        again = HostedAnswer(rest)
        got = resume.choices[0].token_ids + resume_of(rest.replies).choices[0].token_ids
        assert got == whole.choices[0].token_ids, len(resume.choices[0].token_ids)
        assert text_and_events(sent + again.body)[0] == text_and_events(undisturbed.body)[0]
        assert again.usage is not None
        assert (again.usage.prompt_tokens, again.usage.completion_tokens) == (undisturbed.usage.prompt_tokens, 40)
        assert again.usage.cached_tokens <= again.usage.prompt_tokens
