"""A model's own Python code is imported by one thread of an engine at a time."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

LOCK = threading.RLock()


def exclusive(trust_remote_code: bool) -> AbstractContextManager[object]:
    """Return what to hold while transformers reads a model.

    With `trust_remote_code`, transformers calls `importlib.invalidate_caches`. On Python 3.11 two threads that do so at once raise KeyError:
    both delete the same entry of `sys.path_importer_cache`.
    """
    return LOCK if trust_remote_code else nullcontext()
