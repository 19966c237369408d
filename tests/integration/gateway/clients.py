"""Clients of the APIs that the gateway serves: `openai`, `anthropic` and `ollama`."""

from __future__ import annotations

from typing import Any

import anthropic
import openai

from tests.integration.gateway.conftest import Served


def openai_client(served: Served, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.base}/v1", api_key=key, max_retries=0, timeout=60)


def anthropic_client(served: Served) -> Any:
    return anthropic.AsyncAnthropic(base_url=served.base, api_key="none", max_retries=0, timeout=60)


def ollama_client(served: Served, **fields: Any) -> Any:
    import ollama  # not installed everywhere: its test modules skip

    return ollama.AsyncClient(host=served.base, timeout=60, **fields)
