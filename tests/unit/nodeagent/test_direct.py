"""Engines that are interpreters of their own, on a machine without room for more processes."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from services.nodeagent.engines.direct import DirectLauncher
from shared.errors import EngineFailed
from tests.support.fake_engine import card_of


async def test_a_clean_up_that_cannot_start_a_process_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent repeats it after a `ThawError`, and ends after any other error."""

    async def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    card = card_of("a", engine="vllm", container={"image": "vllm:1"})
    with pytest.raises(EngineFailed, match="Resource temporarily unavailable"):
        await DirectLauncher("services.enginehost", tmp_path / "specs").clean_up("i", card)
