"""Files of batches that cannot be read or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thaw.cli.api import Api
from thaw.cli.batch_client import BatchClient
from thaw.errors import CommandError


@pytest.fixture
def client() -> BatchClient:
    return BatchClient(Api("http://127.0.0.1:9"))


def test_results_that_cannot_be_written_are_an_error(client: BatchClient) -> None:
    with pytest.raises(CommandError, match=r"/proc/results\.jsonl cannot be written"):
        client.download("file-1", Path("/proc/results.jsonl"))


def test_requests_that_cannot_be_read_are_an_error(client: BatchClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CommandError, match="cannot be read: Permission denied"):
        client.create(tmp_path / "requests.jsonl", "/v1/chat/completions", "24h")
