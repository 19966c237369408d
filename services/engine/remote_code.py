"""Serialises imports of a model's own Python code (`trust_remote_code`)."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

LOCK = threading.RLock()


def guard_remote_code(trust_remote_code: bool) -> AbstractContextManager[object]:
    """Return a context manager to hold while transformers reads a model.

    With `trust_remote_code`, transformers calls `importlib.invalidate_caches`. On Python 3.11 two
    concurrent calls raise KeyError, because both delete the same entry of
    `sys.path_importer_cache`.
    """
    return LOCK if trust_remote_code else nullcontext()
