"""A gateway's copy of the API keys, which gets its own changes before the bucket's watcher does."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.adapters.key_marker import KeyMarker
from services.gateway.adapters.key_store import KeyStore
from shared.contracts.keys import ApiKey

VALUE = ApiKey(name="alice", scope="read-only", created=1).model_dump_json().encode()


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    store = KeyStore(KeyMarker(tmp_path / "keys"))
    store.replace(store.own_writes.on_snapshot({}, 0))
    return store


def deliver(store: KeyStore, value: bytes | None, revision: int) -> None:
    """Deliver an entry as the bucket's watcher does."""
    if store.own_writes.on_delivered("a", revision):
        store.put("a", value) if value is not None else store.remove("a")


def test_late_record_does_not_make_a_revoked_key_valid(store: KeyStore) -> None:
    store.on_written("a", VALUE, 5)
    store.on_written("a", None, 6)
    deliver(store, VALUE, 5)
    assert store.find("a") is None
    deliver(store, None, 6)
    assert store.find("a") is None


def test_change_by_another_gateway_after_an_own_one_takes_effect(store: KeyStore) -> None:
    store.on_written("a", None, 6)
    deliver(store, VALUE, 7)
    assert store.find("a") is not None
    deliver(store, None, 8)
    assert store.find("a") is None


def test_write_that_resumes_after_a_later_revocation_has_no_effect(store: KeyStore) -> None:
    """The watcher delivers the write, and a revocation by another gateway, before that."""
    deliver(store, VALUE, 5)
    deliver(store, None, 6)
    store.on_written("a", VALUE, 5)
    assert store.find("a") is None


@pytest.mark.parametrize(("snapshot_at", "is_valid"), [(5, False), (7, True)])
def test_snapshot_has_the_own_writes_since(store: KeyStore, snapshot_at: int, is_valid: bool) -> None:
    store.on_written("a", VALUE, 5)
    store.on_written("a", None, 6)
    store.replace(store.own_writes.on_snapshot({"a": VALUE}, snapshot_at))
    assert (store.find("a") is not None) is is_valid
