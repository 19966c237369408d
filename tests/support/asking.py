"""A request and its reply, for tests and benchmarks of the messaging."""

from __future__ import annotations

from typing import Literal

from pydantic import TypeAdapter

from shared.contracts.base import Message, Request


class Ask(Request):
    kind: Literal["ask"] = "ask"
    value: int


class Answer(Message):
    kind: Literal["answer"] = "answer"
    value: int


ASK: TypeAdapter[Ask] = TypeAdapter(Ask)
