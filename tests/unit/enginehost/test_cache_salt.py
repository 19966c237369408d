"""The salt of an API key's prefix cache."""

from __future__ import annotations

from typing import Any

import pytest

from services.enginehost.drivers.cache_salt import cache_salt


def test_keys_have_different_salts_that_do_not_change() -> None:
    assert cache_salt("a", None) == cache_salt("a", None) != cache_salt("b", None)


def test_salt_is_accepted_by_vllm() -> None:
    """At most 128 characters, without separators (`validate_cache_salt` of vLLM 0.32)."""
    salt = cache_salt("a", "@/\\\0" * 100)
    assert 0 < len(salt) <= 128
    assert not set("@/\\\0") & set(salt)


def test_salt_of_a_client_divides_the_cache_of_its_key_only() -> None:
    assert cache_salt("a", "mine") not in (cache_salt("a", None), cache_salt("b", "mine"), "mine")
    assert cache_salt("b", cache_salt("a", None)) != cache_salt("a", None)


def test_request_without_a_key_keeps_its_own_salt() -> None:
    assert cache_salt("", None) is None
    assert cache_salt("", "mine") == "mine"


@pytest.mark.parametrize("given", [7, "", ["x"]])
def test_invalid_salt_reaches_the_engine_that_rejects_it(given: Any) -> None:
    assert cache_salt("a", given) == given
