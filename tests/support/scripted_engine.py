"""A fake engine that generates a prepared response, token by token.

It resumes a response of another engine, and holds back text as a real engine does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.engine.domain.generation import Generation
from services.engine.domain.sampling_params import StopConditions
from shared.contracts.inference import (
    ChoiceDelta,
    InferChunk,
    InferFinished,
    InferStarted,
    InferYielded,
    Resume,
    ResumedChoice,
    TokenLogprob,
    Usage,
)
from shared.errors import Conflict
from tests.support.fake_engine import Run

PROMPT_TOKENS = 7


@dataclass(frozen=True)
class Script:
    """The model's output for a request: a text for each choice.

    A token is a byte of it, in UTF-8.
    """

    texts: tuple[str, ...]
    stops: tuple[str, ...] = ()
    revision: str = "0"
    logprobs: bool = False

    def answer(self, resume: Resume | None) -> Iterator[InferStarted | InferChunk | InferFinished]:
        """Return the unnumbered messages for a response, or for the rest of one."""
        there = {c.index: c for c in resume.choices} if resume is not None else {}
        yield InferStarted(prompt_tokens=PROMPT_TOKENS, seed=3)
        left: list[Choice] = []
        for index, text in enumerate(self.texts):
            tokens = text.encode()
            choice = Choice(index, Generation(_decode, (), StopConditions(len(tokens), stops=self.stops)), tokens)
            if (whole := choice.resume(there.get(index))) is not None:
                yield from whole
            else:
                left.append(choice)
        total = sum(len(c.token_ids) for c in there.values())
        while left:
            for choice in list(left):
                delta = choice.next(self.logprobs)
                total += 1
                yield InferChunk(seq=0, choices=(delta,))
                if delta.finish_reason is not None:
                    left.remove(choice)
        yield InferFinished(seq=0, usage=Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=total))


@dataclass
class Choice:
    """The rest of one choice.

    Attributes:
        owed: Text of tokens that another engine generated.
    """

    index: int
    generation: Generation
    tokens: bytes
    owed: str = ""

    def resume(self, begun: ResumedChoice | None) -> list[InferChunk] | None:
        """Return the messages of a complete choice; None if it continues."""
        if begun is None:
            return None
        if begun.finish_reason is not None:
            return []
        count = len(begun.token_ids)
        assert bytes(begun.token_ids) == self.tokens[:count]
        self.tokens = self.tokens[count:]
        owed = self.generation.resume(begun.token_ids, begun.text_chars)
        if owed.finish_reason is None:
            self.owed = owed.text
            return None
        return [InferChunk(seq=0, choices=(ChoiceDelta(index=self.index, text=owed.text, finish_reason=owed.finish_reason),))]

    def next(self, logprobs: bool) -> ChoiceDelta:
        token, self.tokens = self.tokens[0], self.tokens[1:]
        gained = self.generation.feed(token)
        owed, self.owed = self.owed, ""
        return ChoiceDelta(
            index=self.index,
            text=owed + gained.text,
            token_ids=(token,),
            logprobs=(_logprob(token),) if logprobs else None,
            finish_reason=gained.finish_reason,
        )


@dataclass
class Teller:
    """Generates messages.

    Attributes:
        at: Called before each token of an attempt, with the number generated. The attempt waits for
            the event that it returns.
        resumed: Number of tokens of each resume state.
    """

    script: Script
    at: Callable[[Run, int], asyncio.Event | None] = lambda run, generated: None
    made: int = 0
    resumed: list[int] = field(default_factory=list)

    async def __call__(self, run: Run) -> None:
        resume = run.request.resume
        if resume is not None:
            self.resumed.append(sum(len(c.token_ids) for c in resume.choices))
            if resume.revision != self.script.revision or resume.prompt_tokens != PROMPT_TOKENS:
                await run.fail(Conflict("another revision", param="resume"))
                return
        generated = 0
        for message in self.script.answer(resume):
            if isinstance(message, InferChunk) and message.choices[0].token_ids:
                if (hold := self.at(run, generated)) is not None:
                    await first_of(hold, run.yielding, run.cancelled)
                if run.yielding.is_set():
                    await run.say(InferYielded(seq=0))
                if run.yielding.is_set() or run.cancelled.is_set():
                    return
                generated += 1
                self.made += 1
            await run.say(message)


async def first_of(*events: asyncio.Event) -> None:
    """Wait for the first of these events."""
    waits = [asyncio.create_task(e.wait()) for e in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def _logprob(token: int) -> TokenLogprob:
    raw = bytes([token])
    return TokenLogprob(token_id=token, token=raw.decode(errors="replace"), logprob=-token / 10, bytes=(token,))
