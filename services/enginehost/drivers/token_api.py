"""How an engine's server tells the ids of its tokens and takes them: what another engine needs to go on with an answer, and this one with its."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic_core import from_json

from services.enginehost.http1 import Client, call, json_request
from shared.errors import EngineFailed

_TEMPLATE = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)


@dataclass(frozen=True)
class Told:
    """Of one event: its tokens. `prompt`: that of the request, where it is told. `made`: tokens generated so far, where that is told; None: all
    that there are have been told."""

    ids: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    made: int | None = None


class TokenApi(ABC):
    """`asked`: fields of a request that have its tokens told. `fixing`: fields that make an answer one that only its engine can end, beside
    those that do everywhere; why."""

    asked: ClassVar[Mapping[str, Any]]
    fixing: ClassVar[Mapping[str, str]] = {}
    tells_prompt = True
    """Whether a stream tells the ids of its prompt; else they are asked for."""

    def unfollowed(self, endpoint: str) -> str:
        """Why the tokens of such answers are not told; empty: they are."""
        return ""

    @abstractmethod
    def told(self, message: dict[str, Any], choice: dict[str, Any], *, hide: bool) -> Told:
        """What an event tells. With `hide` it is taken out of it, as its client did not ask for it."""

    @abstractmethod
    def retell(self, message: dict[str, Any], choice: dict[str, Any], ids: Sequence[int]) -> None:
        """Have an event of a resumed answer tell these tokens, and no prompt: its client has the others."""

    @abstractmethod
    async def prompt(self, body: Mapping[str, Any], model: str, client: Client, *, chat: bool) -> list[int]:
        """The prompt's token ids, as the engine makes them."""

    @abstractmethod
    async def text(self, tokens: Sequence[int], model: str, client: Client) -> str: ...


class VllmTokens(TokenApi):
    """`return_token_ids`, /tokenize and /detokenize."""

    asked: ClassVar = {"return_token_ids": True}

    def told(self, message: dict[str, Any], choice: dict[str, Any], *, hide: bool) -> Told:
        prompt = message.get("prompt_token_ids") or choice.get("prompt_token_ids") or ()
        found = Told(tuple(choice.get("token_ids") or ()), tuple(prompt))
        if hide:
            for place, name in ((message, "prompt_token_ids"), (choice, "prompt_token_ids"), (choice, "token_ids")):
                place.pop(name, None)
        return found

    def retell(self, message: dict[str, Any], choice: dict[str, Any], ids: Sequence[int]) -> None:
        message.pop("prompt_token_ids", None)
        choice.pop("prompt_token_ids", None)
        choice["token_ids"] = list(ids)

    async def prompt(self, body: Mapping[str, Any], model: str, client: Client, *, chat: bool) -> list[int]:
        if not chat and isinstance(body["prompt"], list):
            return list(body["prompt"])
        asked: dict[str, Any] = {"model": model}
        if chat:
            asked |= {k: body[k] for k in _TEMPLATE if body.get(k) is not None}
        else:
            asked |= {"prompt": body["prompt"], "add_special_tokens": body.get("add_special_tokens", True)}
        return await _counted(asked, client)

    async def text(self, tokens: Sequence[int], model: str, client: Client) -> str:
        return await _read({"model": model, "tokens": list(tokens)}, "prompt", client)


class LlamaServerTokens(TokenApi):
    """llama-server's /v1/completions with `verbose`: each event has its last token, and how many there are. Of a character that several tokens
    make only the last is told: such an answer is gone on with from before it. Its /v1/chat/completions tells none."""

    asked: ClassVar = {"return_tokens": True, "verbose": True}
    fixing: ClassVar = {
        "grammar": "its grammar would begin anew",
        "json_schema": "its grammar would begin anew",
        "mirostat": "mirostat remembers what was generated here only",
        "repeat_penalty": "penalties count what was generated here only",
        "dry_multiplier": "penalties count what was generated here only",
        "n_probs": "log-probabilities of two engines have two forms",
    }
    tells_prompt = False

    def unfollowed(self, endpoint: str) -> str:
        return "llama-server tells the token ids of text completions, not of chats" if endpoint == "chat" else ""

    def told(self, message: dict[str, Any], choice: dict[str, Any], *, hide: bool) -> Told:
        found = message.get("__verbose") or {}
        if hide:
            message.pop("__verbose", None)
        return Told(tuple(found.get("tokens") or ()), made=found.get("tokens_predicted", -1))

    def retell(self, message: dict[str, Any], choice: dict[str, Any], ids: Sequence[int]) -> None:
        if "__verbose" in message:
            message["__verbose"]["tokens"] = list(ids)

    async def prompt(self, body: Mapping[str, Any], model: str, client: Client, *, chat: bool) -> list[int]:
        if isinstance(body["prompt"], list):
            return list(body["prompt"])
        return await _counted({"content": body["prompt"], "add_special": True, "parse_special": True}, client)

    async def text(self, tokens: Sequence[int], model: str, client: Client) -> str:
        return await _read({"tokens": list(tokens)}, "content", client)


async def _counted(asked: dict[str, Any], client: Client) -> list[int]:
    answer = from_json(await call(client, json_request("/tokenize", asked), "counting the prompt's tokens"))
    tokens = answer.get("tokens")
    if not isinstance(tokens, list):
        raise EngineFailed("counting the prompt's tokens: the engine did not tell them")
    return tokens


async def _read(asked: dict[str, Any], name: str, client: Client) -> str:
    answer = from_json(await call(client, json_request("/detokenize", asked), "reading the answer's tokens"))
    text = answer.get(name)
    if not isinstance(text, str):
        raise EngineFailed("reading the answer's tokens: the engine did not tell their text")
    return text
