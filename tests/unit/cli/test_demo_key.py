"""The demo on an endpoint that requires a key: it creates one, and revokes it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from thaw.cli.api import Api
from thaw.cli.demo import usable_key
from thaw.errors import CommandError


class Recorder(Api):
    """Answers with `keys`, and records the calls."""

    def __init__(self, keys: dict[str, Any], api_key: str | None = None) -> None:
        super().__init__("http://127.0.0.1:1", "admin", api_key)
        self._keys = keys
        self.calls: list[tuple[str, str, str | None]] = []

    def request(self, method: str, path: str, content: str | None = None, **_: Any) -> Any:
        self.calls.append((method, path, content))
        return self._keys


NAMED = {"keys": [{"name": "a", "scope": "inference", "sha256": "0" * 64, "created": 1}]}


@pytest.mark.parametrize("keys", [{"required": True}, {"configured": 1}, NAMED])
def test_demo_key_is_created_used_and_revoked(keys: dict[str, Any]) -> None:
    api = Recorder(keys)
    seen = []

    def use() -> None:
        with usable_key(api):
            seen.append(api.api_key or "")
            raise CommandError("a model failed")

    with pytest.raises(CommandError):
        use()
    digest = hashlib.sha256(seen[0].encode()).hexdigest()
    (_, made, revoked) = api.calls
    body = json.loads(made[2] or "")
    assert (made[0], body["scope"], body["sha256"]) == ("POST", "inference", digest)
    assert revoked[:2] == ("DELETE", f"/admin/v1/keys/{body['name']}")
    assert api.api_key is None


@pytest.mark.parametrize(("keys", "own"), [({}, None), ({"required": True}, "sk-mine")])
def test_no_demo_key_is_created_if_none_is_required(keys: dict[str, Any], own: str | None) -> None:
    api = Recorder(keys, own)
    with usable_key(api):
        assert api.api_key == own
    assert [method for method, _, _ in api.calls] == ["GET"]
