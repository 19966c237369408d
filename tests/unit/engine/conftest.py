"""A demo model's files, created once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from thaw.demo.models import make_demo_model

    return make_demo_model(tmp_path_factory.mktemp("demo") / "test", "test")
