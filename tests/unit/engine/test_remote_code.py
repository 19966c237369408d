"""One thread at a time imports models' own code.

importlib's caches are not thread-safe.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from services.engine import remote_code
from services.engine.model import checkpoint
from services.engine.tokenization import Tokenization
from shared.errors import CheckpointInvalid


def _is_free() -> bool:
    """True if another thread could import a model's own code now."""
    found: list[bool] = []

    def try_lock() -> None:
        found.append(remote_code.LOCK.acquire(blocking=False))
        if found[0]:
            remote_code.LOCK.release()

    thread = threading.Thread(target=try_lock)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("trusted", [True, False])
def test_models_with_remote_code_are_read_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch, trusted: bool) -> None:
    free: list[bool] = []

    def fail_to_read(*_: Any, **__: Any) -> None:
        free.append(_is_free())
        raise OSError("not readable")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail_to_read)
    monkeypatch.setattr(AutoConfig, "from_pretrained", fail_to_read)
    card: Any = SimpleNamespace(spec=SimpleNamespace(trust_remote_code=trusted))
    with pytest.raises(CheckpointInvalid):
        Tokenization.read(Path("model"), trusted)
    with pytest.raises(CheckpointInvalid):
        checkpoint.read_config(Path("model"), card)
    assert free == [not trusted] * 2
    assert _is_free()
