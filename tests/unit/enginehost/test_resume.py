"""Which tokens an engine gets of a response that it resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from services.enginehost.drivers.port import Launch
from services.enginehost.drivers.token_api import LlamaServerTokens, TokenApi, VllmTokens
from services.enginehost.drivers.vllm import Vllm
from services.enginehost.http1 import Client
from services.enginehost.server.resume import build_request
from services.enginehost.server.token_tracker import ResumeState
from services.enginehost.settings import HostSettings
from shared.contracts.inference import InferRequest, Resume, ResumedChoice
from tests.support.hosted import MIB, hosted_card

WORDS = {1: "Say: ", 10: "The", 11: " end", 12: ".\n", 13: "\ufffd"}
STOP = "\n\nHuman:"


class Words(VllmTokens):
    """Tokens are words."""

    async def prompt(self, *_: Any, **__: Any) -> list[int]:
        return [1]

    async def text(self, tokens: Sequence[int], *_: Any) -> str:
        return "".join(WORDS[token] for token in tokens)


class LlamaWords(LlamaServerTokens):
    """The same tokens, in llama-server's API."""

    async def prompt(self, *_: Any, **__: Any) -> list[int]:
        return [1]

    async def text(self, tokens: Sequence[int], *_: Any) -> str:
        return "".join(WORDS[token] for token in tokens)


async def begin_resume(
    tmp_path: Path, tokens: tuple[int, ...], text_chars: int, asked: dict[str, Any], api: TokenApi | None = None
) -> tuple[dict[str, Any], ResumeState]:
    """Return the request that the engine gets, and the existing part of the response."""
    card = hosted_card("engine://demo", "vllm", memory=MIB)
    driver = Vllm(Launch(card=card, device="cpu:0", kv_bytes=1, host="h", port=1, key="k", settings=HostSettings(home=tmp_path)))
    driver.tokens = Words() if api is None else api  # type: ignore[assignment]
    choice = ResumedChoice(token_ids=tokens, text_chars=text_chars)
    resume = Resume(revision="r1", choices=(choice,), prompt_tokens=1, takes_kept_tokens=True)
    asked = {"stream": True, "prompt": "Say: ", **asked}
    request = InferRequest(request_id="r", instance_id="i", model="demo", endpoint="completion", body=asked, resume=resume)
    _, outgoing, state, _ = await build_request(request, driver, cast(Client, None))
    return json.loads(outgoing.body), state


async def ask_to_resume(tmp_path: Path, tokens: tuple[int, ...], text_chars: int, **body: Any) -> tuple[list[int], ResumeState]:
    """Return the prompt that the engine gets, and the existing part of the response."""
    asked, state = await begin_resume(tmp_path, tokens, text_chars, {"max_tokens": 50, "stop": [STOP], **body})
    return asked["prompt"], state


@pytest.mark.parametrize("temperature", [{}, {"temperature": 0.7}])
async def test_sampling_engine_gets_the_tokens_that_the_client_has_in_part(tmp_path: Path, temperature: dict[str, float]) -> None:
    """The client has "The e". Another token than " end" would continue it without its beginning."""
    prompt, state = await ask_to_resume(tmp_path, (10, 11, 12), 5, **temperature)
    assert prompt == [1, 10, 11], "a stop string may begin in the last one"
    assert (state.kept, state.skip_chars, state.lead) == (2, 0, "nd")
    assert state.replaces_tokens


async def test_greedy_engine_generates_the_tokens_that_the_client_has_in_part(tmp_path: Path) -> None:
    prompt, state = await ask_to_resume(tmp_path, (10, 11, 12), 5, temperature=0)
    assert prompt == [1, 10]
    assert (state.kept, state.skip_chars, state.lead) == (1, 2, "")
    assert not state.replaces_tokens, "it generates them again"


@pytest.mark.parametrize(("tokens", "text_chars"), [((10, 11, 12), 8), ((10, 11, 13), 7)], ids=["stop string", "half a character"])
async def test_engine_generates_what_may_be_a_stop_string_or_character(
    tmp_path: Path, tokens: tuple[int, ...], text_chars: int
) -> None:
    prompt, state = await ask_to_resume(tmp_path, tokens, text_chars, temperature=0.7)
    assert prompt == [1, 10, 11]
    assert (state.kept, state.skip_chars, state.lead) == (2, text_chars - 7, "")


async def test_all_tokens_are_kept_if_no_stop_string_can_begin(tmp_path: Path) -> None:
    prompt, state = await ask_to_resume(tmp_path, (10, 11, 12), 5, temperature=0.7, stop="Human:")
    assert prompt == [1, 10, 11, 12]
    assert (state.kept, state.lead) == (3, "nd.\n")


@pytest.mark.parametrize(
    ("api", "limit", "most"), [(Words(), {}, 16), (Words(), {"max_tokens": None}, 255), (LlamaWords(), {}, 255)]
)
async def test_limit_without_max_tokens_is_that_of_the_engine(
    tmp_path: Path, api: TokenApi, limit: dict[str, None], most: int
) -> None:
    """The context has 256 tokens, and the prompt is one of them."""
    asked, state = await begin_resume(tmp_path, (10, 11), 7, {"temperature": 0, **limit}, api)
    assert (state.kept, asked["max_tokens"]) == (2, most - 2)
