"""The loader, which reads large files slowly: `python -m tests.support.slow_loader`.

A load of gibibytes lasts for half a minute or more. It is not complete when a test ends it, even if
the test is paused for seconds before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

from services.loader.app import run
from services.loader.settings import LoaderSettings
from shared.runtime import run_service
from weights.transfer.pieces import Piece
from weights.transfer.reader import FilesReader

MODULE: Final = "tests.support.slow_loader"
_FAST_BYTES = 64 * 1024 * 1024
"""The beginning of each file is read without a delay."""
_PIECE_S = 1.0
"""Delay of each later piece; several threads read."""


def _slow_down(read: Callable[[FilesReader, Piece], None]) -> Callable[[FilesReader, Piece], None]:
    def read_slowly(reader: FilesReader, piece: Piece) -> None:
        if piece.offset >= _FAST_BYTES:
            time.sleep(_PIECE_S)
        read(reader, piece)

    return read_slowly


if __name__ == "__main__":
    FilesReader.read = _slow_down(FilesReader.read)  # type: ignore[assignment]
    sys.exit(run_service("loader", LoaderSettings, run))
