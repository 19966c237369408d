"""A fake engine that says a prepared answer, token by token, and goes on with one that another has begun: its tokens' text comes with holdbacks,
as a real engine's does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.engine.domain.generation import Gained, Generation
from services.engine.domain.params import Ending
from shared.contracts.inference import ChoiceDelta, InferChunk, InferFinished, InferYielded, TokenLogprob, Usage
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
class Teller:
    """`at` is called before each token of each attempt and may hold it up, or raise to end it; what is to be said is up to the script."""

    script: Script
    at: Callable[[Run, int], asyncio.Event | None] = lambda run, said: None
    logprobs: bool = False
    made: int = 0
    resumed: list[int] = field(default_factory=list)

    async def __call__(self, run: Run) -> None:
        resume = run.request.resume
        there = {c.index: c for c in resume.choices} if resume is not None else {}
        if resume is not None:
            self.resumed.append(sum(len(c.token_ids) for c in resume.choices))
            if resume.revision != self.script.revision or resume.prompt_tokens != PROMPT_TOKENS:
                await run.fail(Conflict("another revision", param="resume"))
                return
        await run.start(seed=3)
        said, total = 0, sum(len(c.token_ids) for c in there.values())
        open_choices: dict[int, tuple[Generation, bytes, str]] = {}
        for index in range(len(self.script.texts)):
            begun, generation = there.get(index), self.script.generation(index)
            tokens, owed = self.script.tokens(index), Gained("")
            if begun is not None:
                if begun.finish_reason is not None:
                    continue
                assert bytes(begun.token_ids) == tokens[: len(begun.token_ids)]
                owed = generation.resume(begun.token_ids, begun.text_chars)
                tokens = tokens[len(begun.token_ids) :]
                if owed.finish_reason is not None:
                    delta = ChoiceDelta(index=index, text=owed.text, finish_reason=owed.finish_reason)
                    await run.say(InferChunk(seq=0, choices=(delta,)))
                    continue
            open_choices[index] = (generation, tokens, owed.text)
        while open_choices:
            for index in list(open_choices):
                if run.yielding.is_set():
                    await run.say(InferYielded(seq=0))
                    return
                if (hold := self.at(run, said)) is not None:
                    waits = [asyncio.create_task(e.wait()) for e in (hold, run.yielding, run.cancelled)]
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    for wait in waits:
                        wait.cancel()
                    if run.yielding.is_set():
                        await run.say(InferYielded(seq=0))
                        return
                if run.cancelled.is_set():
                    return
                generation, tokens, owed_text = open_choices[index]
                gained = generation.feed(tokens[0])
                logprobs = (self._logprob(tokens[0]),) if self.logprobs else None
                delta = ChoiceDelta(
                    index=index,
                    text=owed_text + gained.text,
                    token_ids=(tokens[0],),
                    logprobs=logprobs,
                    finish_reason=gained.finish_reason,
                )
                await run.say(InferChunk(seq=0, choices=(delta,)))
                said, total = said + 1, total + 1
                self.made += 1
                if gained.finish_reason is None:
                    open_choices[index] = (generation, tokens[1:], "")
                else:
                    del open_choices[index]
        await run.say(InferFinished(seq=0, usage=Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=total)))

    def _logprob(self, token: int) -> TokenLogprob:
        raw = bytes([token])
        return TokenLogprob(token_id=token, token=raw.decode(errors="replace"), logprob=-token / 10, bytes=(token,))
