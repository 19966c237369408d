"""API keys: the administrator's, and those that tests add."""

from __future__ import annotations

from typing import Any

from services.gateway.authorization import hash_key
from tests.integration.gateway.conftest import Served

ADMIN = {"authorization": "Bearer root"}


async def add_key(served: Served, name: str, key: str, **fields: Any) -> None:
    body = {"name": name, "sha256": hash_key(key)} | fields
    answer = await served.http.post("/admin/v1/keys", json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text


async def status_of(served: Served, key: str, path: str = "/v1/models", method: str = "GET", **body: Any) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return (await served.http.request(method, path, headers=headers, json=body or None)).status_code
