"""Resumes a response that another engine of the same weights began.

The completions endpoint gets its token ids.

The text of a response lags behind its tokens (half a character, the beginning of a stop string).
The engine receives the tokens whose text the client has completely, and generates the others again.
So it finds a stop string that spans the switch, and splits no character. A sampling engine would
generate others: it receives also those whose text the client has in part, and the host sends the
rest of that text. Tokens that it generates in place of earlier ones replace those in the gateway,
from which the response may be resumed once more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from services.enginehost.drivers.cache_salt import cache_fields
from services.enginehost.drivers.port import Driver
from services.enginehost.drivers.token_api import TokenApi
from services.enginehost.http1 import Client, HttpRequest, json_request
from services.enginehost.server.token_tracker import ResumeState, not_resumable_reason
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
_TORN = "\ufffd"


async def build_request(
    request: InferRequest, driver: Driver, client: Client
) -> tuple[TokenApi, HttpRequest, ResumeState, tuple[int, ...]]:
    """Build the request that resumes a response.

    Returns:
        How the engine reports tokens, the request, the existing part of the response, and all token
        ids given to the engine.

    Raises:
        Conflict: This engine cannot resume the response (`param` is `RESUME`).
        EngineFailed: The engine does not answer.
    """
    resume = request.resume
    assert resume is not None
    card = driver.card
    if resume.revision != card.info.revision:
        raise Conflict(f"{card.name} has weights of revision {card.info.revision} here, not {resume.revision}", param=RESUME)
    api, chat = driver.tokens, request.endpoint == "chat"
    fixed = not_resumable_reason(driver, request.endpoint, request.body)
    if not fixed and (len(resume.choices) != 1 or resume.choices[0].finish_reason is not None):
        fixed = "only one unfinished choice can be resumed"
    if fixed or api is None:
        raise Conflict(f"{card.name} cannot resume this response: {fixed}", param=RESUME)
    prompt = await api.prompt(request.body, driver.name_of(request.adapter), client, chat=chat)
    if len(prompt) != resume.prompt_tokens:
        raise Conflict(f"The prompt has {len(prompt)} tokens here, and {resume.prompt_tokens} where it began", param=RESUME)
    choice = resume.choices[0]
    most = _limit_tokens(request, api, card.context_length - len(prompt))
    kept, skip_chars, lead = await _choose_kept(request, prompt, choice, most, _text_of(request, api, driver, client))
    given = (*prompt, *choice.token_ids[:kept])
    body = {k: v for k, v in driver.body(request.body, request.adapter).items() if k not in _CHAT_ONLY}
    body |= {"prompt": list(given), "max_tokens": most - kept, "stream": True, **api.request_fields}
    body |= driver.share_fields(request.share) | cache_fields(request, driver)
    if isinstance(least := body.get("min_tokens"), int):
        body["min_tokens"] = max(0, least - kept)
    body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    is_replaced = resume.takes_kept_tokens and not _is_greedy(request)
    resume_state = ResumeState(resume.head, len(prompt), len(choice.token_ids), kept, skip_chars, chat, lead, is_replaced)
    return api, json_request("/v1/completions", body), resume_state, given


async def _choose_kept(
    request: InferRequest, prompt: Sequence[int], choice: ResumedChoice, most: int, text_of: TextOf
) -> tuple[int, int, str]:
    """Choose the tokens that the engine gets.

    Returns:
        Their number, characters of regenerated text that the client has, and text that the client
        gets before the regenerated text.

    Raises:
        Conflict: The client has text of tokens that are not known.
    """
    kept, chars = await _count_kept(prompt, choice, most, text_of)
    skip_chars = choice.text_chars - chars
    if _is_greedy(request) or skip_chars <= 0:
        return kept, skip_chars, ""
    if kept == len(choice.token_ids):
        raise Conflict(f"{request.model} cannot resume this response: not all of its tokens are known", param=RESUME)
    begun = await _complete_text(prompt, choice, range(kept + 1, most), _stop_strings(request), text_of)
    return (begun[0], 0, begun[1]) if begun is not None else (kept, skip_chars, "")


def _is_greedy(request: InferRequest) -> bool:
    """True if the engine generates the same tokens again."""
    return request.body.get("temperature") == 0


def _text_of(request: InferRequest, api: TokenApi, driver: Driver, client: Client) -> TextOf:
    """A function from token ids to the text that clients receive.

    It drops the special tokens that the engine leaves out, which /detokenize does not.
    """
    hidden = frozenset(driver.card.info.special_token_ids if request.body.get("skip_special_tokens", True) else ())

    async def text_of(tokens: Sequence[int]) -> str:
        return await api.text([t for t in tokens if t not in hidden], driver.name_of(request.adapter), client)

    return text_of


def _limit_tokens(request: InferRequest, api: TokenApi, room: int) -> int:
    """The largest number of tokens that the response may have."""
    body = request.body
    asked = body.get("max_tokens")
    if request.endpoint == "chat":
        preferred = body.get("max_completion_tokens")
        asked = asked if preferred is None else preferred
    elif "max_tokens" not in body:
        asked = api.default_completion_tokens
    return room if asked is None else min(room, int(asked))


async def _count_kept(prompt: Sequence[int], choice: ResumedChoice, most: int, text_of: TextOf) -> tuple[int, int]:
    """The number of tokens whose text the client has completely, and its characters.

    At least one token is left for the engine to generate, so that it can end the response.
    """
    before = len(await text_of(prompt[-_CONTEXT:]))
    for kept in range(min(len(choice.token_ids), most - 1), 0, -1):
        text = await text_of([*prompt[-_CONTEXT:], *choice.token_ids[:kept]])
        if len(text) - before <= choice.text_chars and not text.endswith(_TORN):
            return kept, max(0, len(text) - before)
    return 0, 0


async def _complete_text(
    prompt: Sequence[int], choice: ResumedChoice, counts: range, stops: Sequence[str], text_of: TextOf
) -> tuple[int, str] | None:
    """The number of tokens whose text the client has at least in part, and the rest of their text.

    Sampled again, these tokens would be others, which do not continue the text that the client has.

    Returns:
        None if that text may begin a stop string, which the engine finds only in text that it
        generates itself.
    """
    before = len(await text_of(prompt[-_CONTEXT:]))
    for count in reversed([n for n in counts if n <= len(choice.token_ids)]):
        text = (await text_of([*prompt[-_CONTEXT:], *choice.token_ids[:count]]))[before:]
        rest = text[choice.text_chars :]
        if len(text) >= choice.text_chars and not text.endswith(_TORN) and not _may_stop(rest, stops):
            return count, rest
    return None


def _stop_strings(request: InferRequest) -> list[str]:
    found = request.body.get("stop")
    return [found] if isinstance(found, str) else list(found or ())


def _may_stop(text: str, stops: Sequence[str]) -> bool:
    """True if a stop string is in the text, or may begin in it."""
    ends = [text[i:] for i in range(len(text))]
    return any(end.startswith(stop) or stop.startswith(end) for end in ends for stop in stops)


_CONTEXT = 8
"""Prompt tokens that are decoded with the response, because the text of a token may depend on the
token before.
"""
