"""A fake engine that says a prepared answer, token by token, and goes on with one that another has begun: its tokens' text comes with holdbacks,
as a real engine's does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.engine.domain.generation import Generation
from services.engine.domain.params import Ending
from shared.contracts.inference import ChoiceDelta, InferChunk, InferFinished, InferYielded, ResumedChoice, TokenLogprob, Usage
from shared.errors import Conflict
from tests.support.fake_engine import Run

PROMPT_TOKENS = 7


@dataclass(frozen=True)
class Script:
    """What a model would say to a request: the tokens of each choice. A token is a byte of the text, in UTF-8."""

    texts: tuple[str, ...]
    stops: tuple[str, ...] = ()
    revision: str = "0"

    def tokens(self, index: int) -> bytes:
        return self.texts[index].encode()

    def generation(self, index: int) -> Generation:
        limit = len(self.tokens(index))
        return Generation(lambda ids: bytes(ids).decode(errors="replace"), (), Ending(limit, stops=self.stops))


@dataclass
class Choice:
    """What is left of one. `owed`: text of what was said elsewhere."""

    index: int
    generation: Generation
    tokens: bytes
    owed: str = ""


@dataclass
class Teller:
    """`at` is called before each token of an attempt, with how many it has said; that waits for the event that it returns."""

    script: Script
    at: Callable[[Run, int], asyncio.Event | None] = lambda run, said: None
    logprobs: bool = False
    made: int = 0
    resumed: list[int] = field(default_factory=list)

    async def __call__(self, run: Run) -> None:
        resume = run.request.resume
        if resume is not None:
            self.resumed.append(sum(len(c.token_ids) for c in resume.choices))
            if resume.revision != self.script.revision or resume.prompt_tokens != PROMPT_TOKENS:
                await run.fail(Conflict("another revision", param="resume"))
                return
        await run.start(seed=3)
        there = {c.index: c for c in resume.choices} if resume is not None else {}
        left = [c for i in range(len(self.script.texts)) if (c := await self._choice(run, i, there.get(i))) is not None]
        if await self._say(run, left):
            total = sum(len(c.token_ids) for c in there.values()) + run.said
            await run.say(InferFinished(seq=0, usage=Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=total)))

    async def _choice(self, run: Run, index: int, begun: ResumedChoice | None) -> Choice | None:
        """What is left to be said of a choice; None: nothing."""
        generation, tokens = self.script.generation(index), self.script.tokens(index)
        if begun is None:
            return Choice(index, generation, tokens)
        if begun.finish_reason is not None:
            return None
        assert bytes(begun.token_ids) == tokens[: len(begun.token_ids)]
        owed = generation.resume(begun.token_ids, begun.text_chars)
        if owed.finish_reason is None:
            return Choice(index, generation, tokens[len(begun.token_ids) :], owed.text)
        await run.say(InferChunk(seq=0, choices=(ChoiceDelta(index=index, text=owed.text, finish_reason=owed.finish_reason),)))
        return None

    async def _say(self, run: Run, choices: list[Choice]) -> bool:
        """Choice by choice, token by token; False if it was stopped."""
        while choices:
            for choice in list(choices):
                if (hold := self.at(run, run.said)) is not None:
                    await first_of(hold, run.yielding, run.cancelled)
                if run.yielding.is_set():
                    await run.say(InferYielded(seq=0))
                if run.yielding.is_set() or run.cancelled.is_set():
                    return False
                if await self.token(run, choice):
                    choices.remove(choice)
        return True

    async def token(self, run: Run, choice: Choice) -> bool:
        """Say one; whether it was the last."""
        token, choice.tokens = choice.tokens[0], choice.tokens[1:]
        gained = choice.generation.feed(token)
        delta = ChoiceDelta(
            index=choice.index,
            text=choice.owed + gained.text,
            token_ids=(token,),
            logprobs=(_logprob(token),) if self.logprobs else None,
            finish_reason=gained.finish_reason,
        )
        choice.owed = ""
        run.said += 1
        self.made += 1
        await run.say(InferChunk(seq=0, choices=(delta,)))
        return gained.finish_reason is not None


async def first_of(*events: asyncio.Event) -> None:
    """Wait for any of them."""
    waits = [asyncio.create_task(e.wait()) for e in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _logprob(token: int) -> TokenLogprob:
    raw = bytes([token])
    return TokenLogprob(token_id=token, token=raw.decode(errors="replace"), logprob=-token / 10, bytes=(token,))
