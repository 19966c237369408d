"""Having an engine go on with an answer that another one of the same weights has begun: its completions endpoint, from token ids.

The text of an answer lags behind its tokens (half a character, the beginning of a stop string). The engine gets those tokens whose text the
client has, whole, and makes the others again: so that a stop string that spans the switch is found, and no character is torn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from services.enginehost.drivers.port import Driver, call, json_request
from services.enginehost.http1 import Client, HttpRequest
from services.enginehost.tracking import ASKED, Begun, fixed_of
from shared.contracts.inference import RESUME, InferRequest, ResumedChoice
from shared.errors import Conflict, EngineFailed

_CHAT_ONLY = (
    "messages",
    "max_completion_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tool_choice",
    "parallel_tool_calls",
)
_TEMPLATE = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, where a completion does not say how many."""
_TORN = "\ufffd"


async def resumed(request: InferRequest, driver: Driver, client: Client) -> tuple[HttpRequest, Begun]:
    """What the engine is asked for `request.resume`, and what is there already.

    Raises `Conflict` (with `RESUME`) if this engine cannot go on with it, `EngineFailed` if it does not answer.
    """
    resume = request.resume
    assert resume is not None
    card = driver.card
    if resume.revision != card.info.revision:
        raise Conflict(f"{card.name} has weights of revision {card.info.revision} here, not {resume.revision}", param=RESUME)
    fixed = (
        fixed_of(request.endpoint, request.body, card.spec.engine_args) if driver.token_resume else "this engine takes no tokens"
    )
    if not fixed and (len(resume.choices) != 1 or resume.choices[0].finish_reason is not None):
        fixed = "one unfinished choice can be gone on with"
    if fixed:
        raise Conflict(f"{card.name} cannot go on with this answer: {fixed}", param=RESUME)
    prompt = await prompt_of(request, driver, client)
    if len(prompt) != resume.prompt_tokens:
        raise Conflict(f"the prompt has {len(prompt)} tokens here, and {resume.prompt_tokens} where it began", param=RESUME)
    choice = resume.choices[0]
    most = _most(request, card.context_length - len(prompt))
    kept, chars = await _kept(prompt, choice, most, driver, client)
    body = {k: v for k, v in driver.body(request.body).items() if k not in _CHAT_ONLY}
    body |= {"prompt": [*prompt, *choice.token_ids[:kept]], "max_tokens": most - kept, "stream": True, ASKED: True}
    if isinstance(least := body.get("min_tokens"), int):
        body["min_tokens"] = max(0, least - kept)
    body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    chat = request.endpoint == "chat"
    begun = Begun(resume.head, len(prompt), len(choice.token_ids), kept, choice.text_chars - chars, chat)
    return json_request("/v1/completions", body), begun


def _most(request: InferRequest, room: int) -> int:
    """Tokens that the answer may have in all."""
    body = request.body
    asked = body.get("max_tokens")
    if request.endpoint == "chat":
        said = body.get("max_completion_tokens")
        asked = asked if said is None else said
    elif asked is None:
        asked = _DEFAULT_COMPLETION_TOKENS
    return room if asked is None else min(room, int(asked))


async def prompt_of(request: InferRequest, driver: Driver, client: Client) -> list[int]:
    """The prompt's token ids, as the engine makes them."""
    body = request.body
    if request.endpoint == "completion" and isinstance(body["prompt"], list):
        return list(body["prompt"])
    asked: dict[str, Any] = {"model": driver.served_name}
    if request.endpoint == "chat":
        asked |= {k: body[k] for k in _TEMPLATE if body.get(k) is not None}
    else:
        asked |= {"prompt": body["prompt"], "add_special_tokens": body.get("add_special_tokens", True)}
    answer = from_json(await call(client, json_request("/tokenize", asked), "counting the prompt's tokens"))
    return _ids(answer)


def _ids(answer: Mapping[str, Any]) -> list[int]:
    tokens = answer.get("tokens")
    if not isinstance(tokens, list):
        raise EngineFailed("counting the prompt's tokens: the engine did not tell them")
    return tokens


async def _kept(prompt: Sequence[int], choice: ResumedChoice, most: int, driver: Driver, client: Client) -> tuple[int, int]:
    """How many of the choice's tokens have all their text with the client, and how many characters those are. At least one token is left
    to be made, so that the engine has something to end with."""
    before = len(await _text(prompt[-_CONTEXT:], driver, client))
    for kept in range(min(len(choice.token_ids), most - 1), 0, -1):
        text = await _text([*prompt[-_CONTEXT:], *choice.token_ids[:kept]], driver, client)
        if len(text) - before <= choice.text_chars and not text.endswith(_TORN):
            return kept, max(0, len(text) - before)
    return 0, 0


_CONTEXT = 8
"""Tokens before the answer that are made text of with it: how a token is written may depend on the one before."""


async def _text(tokens: Sequence[int], driver: Driver, client: Client) -> str:
    asked = json_request("/detokenize", {"model": driver.served_name, "tokens": list(tokens)})
    answer = from_json(await call(client, asked, "reading the answer's tokens"))
    text = answer.get("prompt")
    if not isinstance(text, str):
        raise EngineFailed("reading the answer's tokens: the engine did not tell their text")
    return text
