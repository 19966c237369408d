"""Sessions of the console: what a cookie's value must be to name a key."""

from __future__ import annotations

import secrets

import pytest

from services.gateway.authorization import hash_key
from services.gateway.domain.console_session import Session, sign_session, verify_session

SECRET, SESSION = b"s" * 32, Session(hash_key("key"), 1000, "0" * 32)
VALUE = sign_session(SECRET, SESSION)


def test_a_session_names_its_key_until_it_expires() -> None:
    assert verify_session(SECRET, VALUE, 999.9) == SESSION
    assert verify_session(SECRET, VALUE, 1000.0) is None


@pytest.mark.parametrize("position", range(0, len(VALUE), 7))
def test_a_changed_character_invalidates_a_session(position: int) -> None:
    other = "1" if VALUE[position] != "1" else "2"
    assert verify_session(SECRET, VALUE[:position] + other + VALUE[position + 1 :], 0.0) is None


@pytest.mark.parametrize(
    "value", ["", "v1", SESSION.key_hash, VALUE + "\n", VALUE.upper(), f"{VALUE}.x", VALUE.replace(".1000.", ".-1000.")]
)
def test_other_values_are_no_sessions(value: str) -> None:
    assert verify_session(SECRET, value, 0.0) is None


def test_another_secret_accepts_no_session() -> None:
    assert verify_session(secrets.token_bytes(32), VALUE, 0.0) is None
