"""The file of API keys: a file that is no text grants nothing, and a replaced one is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.gateway.authorization import KeyFile, hash_key

ALICE, BOB = hash_key("alice"), hash_key("bob")


@pytest.fixture(autouse=True)
def without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.authorization._CHECK_INTERVAL_S", 0.0)


def test_a_file_that_is_no_text_has_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{ALICE}\n")
    file = KeyFile(path)
    assert file.hashes() == {ALICE}
    path.write_bytes(b"\xff\xfe" + ALICE.encode())
    assert file.hashes() == frozenset()
    path.write_text(f"{BOB}\n")
    assert file.hashes() == {BOB}


def test_a_replaced_file_of_the_same_size_and_time_is_read(tmp_path: Path) -> None:
    """Tools that make files reproducibly give all of them the same time."""
    path, draft = tmp_path / "keys", tmp_path / "draft"
    for file, key in ((path, ALICE), (draft, BOB)):
        file.write_text(f"{key}\n")
        os.utime(file, ns=(10**9, 10**9))
    keys = KeyFile(path)
    assert keys.hashes() == {ALICE}
    draft.replace(path)
    assert keys.hashes() == {BOB}
