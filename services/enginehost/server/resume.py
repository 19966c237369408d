"""Having an engine go on with an answer that another one of the same weights has begun: its completions endpoint, from token ids.

The text of an answer lags behind its tokens (half a character, the beginning of a stop string). The engine gets those tokens whose text the
client has, whole, and makes the others again: so that a stop string that spans the switch is found, and no character is torn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from services.enginehost.drivers.port import Driver
from services.enginehost.drivers.token_api import TokenApi
from services.enginehost.http1 import Client, HttpRequest, json_request
from services.enginehost.server.token_tracker import Begun, fixed_at
from shared.contracts.inference import RESUME, InferRequest, ResumedChoice
from shared.errors import Conflict

TextOf = Callable[[Sequence[int]], Awaitable[str]]

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
_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, where a completion does not say how many."""
_TORN = "\ufffd"


async def resumed(request: InferRequest, driver: Driver, client: Client) -> tuple[TokenApi, HttpRequest, Begun, tuple[int, ...]]:
    """How it tells its tokens, what the engine is asked for `request.resume`, what is there already, and all the tokens that it is given.

    Raises `Conflict` (with `RESUME`) if this engine cannot go on with it, `EngineFailed` if it does not answer.
    """
    resume = request.resume
    assert resume is not None
    card = driver.card
    if resume.revision != card.info.revision:
        raise Conflict(f"{card.name} has weights of revision {card.info.revision} here, not {resume.revision}", param=RESUME)
    api, chat = driver.tokens, request.endpoint == "chat"
    fixed = fixed_at(driver, request.endpoint, request.body)
    if not fixed and (len(resume.choices) != 1 or resume.choices[0].finish_reason is not None):
        fixed = "one unfinished choice can be gone on with"
    if fixed or api is None:
        raise Conflict(f"{card.name} cannot go on with this answer: {fixed}", param=RESUME)
    prompt = await api.prompt(request.body, driver.served_name, client, chat=chat)
    if len(prompt) != resume.prompt_tokens:
        raise Conflict(f"the prompt has {len(prompt)} tokens here, and {resume.prompt_tokens} where it began", param=RESUME)
    choice = resume.choices[0]
    most = _most(request, card.context_length - len(prompt))
    kept, chars = await _kept(prompt, choice, most, _text_of(request, api, driver, client))
    if kept == len(choice.token_ids) and choice.text_chars > chars and request.body.get("temperature") != 0:
        raise Conflict(f"{card.name} cannot go on with this answer: not all of its tokens are known", param=RESUME)
    given = (*prompt, *choice.token_ids[:kept])
    body = {k: v for k, v in driver.body(request.body).items() if k not in _CHAT_ONLY}
    body |= {"prompt": list(given), "max_tokens": most - kept, "stream": True, **api.asked}
    if isinstance(least := body.get("min_tokens"), int):
        body["min_tokens"] = max(0, least - kept)
    body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    begun = Begun(resume.head, len(prompt), len(choice.token_ids), kept, choice.text_chars - chars, chat)
    return api, json_request("/v1/completions", body), begun, given


def _text_of(request: InferRequest, api: TokenApi, driver: Driver, client: Client) -> TextOf:
    """What the client is told of tokens: without those that the engine leaves out, as /detokenize does not."""
    hidden = frozenset(driver.card.info.special_token_ids if request.body.get("skip_special_tokens", True) else ())

    async def text_of(tokens: Sequence[int]) -> str:
        return await api.text([t for t in tokens if t not in hidden], driver.served_name, client)

    return text_of


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


async def _kept(prompt: Sequence[int], choice: ResumedChoice, most: int, text_of: TextOf) -> tuple[int, int]:
    """How many of the choice's tokens have all their text with the client, and how many characters those are. At least one token is left
    to be made, so that the engine has something to end with."""
    before = len(await text_of(prompt[-_CONTEXT:]))
    for kept in range(min(len(choice.token_ids), most - 1), 0, -1):
        text = await text_of([*prompt[-_CONTEXT:], *choice.token_ids[:kept]])
        if len(text) - before <= choice.text_chars and not text.endswith(_TORN):
            return kept, max(0, len(text) - before)
    return 0, 0


_CONTEXT = 8
"""Tokens before the answer that are made text of with it: how a token is written may depend on the one before."""
