"""A zygote that never listens: `python -m tests.support.silent_zygote SOCKET`."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.pause()
