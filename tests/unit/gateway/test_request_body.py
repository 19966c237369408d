"""The time limit of a request's body begins before its first byte."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from services.gateway.http.parsing.body import read_body
from shared.errors import RequestTimeout


async def test_a_body_of_which_nothing_arrives_times_out() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nothing arrives")

    async with asyncio.timeout(60):
        with pytest.raises(RequestTimeout, match="not complete"):
            await read_body({"type": "http"}, receive, limit=100, timeout_s=0.01)
