"""Copies of LoRA adapters for a hosted engine: one directory of a host, gone with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.enginehost.drivers.port import Driver
from services.enginehost.http1 import Address, Client
from services.enginehost.lora.source import FILES, HostedAdapterSource
from shared.contracts.models import ModelCard
from shared.errors import Unavailable
from tests.support.hosted import hosted_card


class FakeDriver(Driver):
    """An engine that notes where it has read adapters."""

    def __init__(self) -> None:
        self.loaded: dict[str, Path] = {}

    async def load_adapter(self, client: Client, name: str, directory: Path) -> None:
        assert all((directory / file).is_file() for file in FILES)
        self.loaded[name] = directory

    async def unload_adapter(self, client: Client, name: str) -> None:
        del self.loaded[name]


class Places:
    """An adapter's files, and the directories that were made for copies."""

    def __init__(self, root: Path) -> None:
        self.root, self.made = root, 0
        self.files = root / "adapter"
        self.files.mkdir()
        for name in FILES:
            (self.files / name).write_text(name)

    async def fetch(self, card: ModelCard) -> Path:
        return self.files

    def make(self) -> Path:
        self.made += 1
        directory = self.root / f"copies{self.made}"
        directory.mkdir()
        return directory

    def copies(self) -> list[str]:
        return sorted(str(p.relative_to(self.root)) for p in self.root.glob("copies*/*"))


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def source_of(places: Places, driver: Driver) -> HostedAdapterSource:
    return HostedAdapterSource(driver, Client(Address()), places.fetch, places.make)


async def test_each_adapter_has_a_copy_until_it_is_dropped(places: Places) -> None:
    driver = FakeDriver()
    source = source_of(places, driver)
    card = hosted_card("/a", "vllm", name="sql")
    assert await source.load(card, 1) == "sql"
    await source.load(card.model_copy(update={"spec": card.spec.model_copy(update={"name": "poems"})}), 2)
    assert places.copies() == ["copies1/1", "copies1/2"]
    await source.drop("sql", 1)
    assert places.copies() == ["copies1/2"]
    assert list(driver.loaded) == ["poems"]


async def test_failed_load_leaves_no_copy_and_may_be_repeated(places: Places) -> None:
    source = source_of(places, FakeDriver())
    card = hosted_card("/a", "vllm", name="sql")
    (places.files / FILES[1]).unlink()
    with pytest.raises(Unavailable, match=FILES[1]):
        await source.load(card, 1)
    assert places.copies() == []
    (places.files / FILES[1]).write_text("again")
    assert await source.load(card, 2) == "sql"


async def test_adapter_that_is_dropped_after_the_end_of_the_host_makes_no_directory(places: Places) -> None:
    source = source_of(places, FakeDriver())
    await source.load(hosted_card("/a", "vllm", name="sql"), 1)
    source.close()
    await source.drop("sql", 1)
    assert (places.copies(), places.made) == ([], 1)
    assert not (places.root / "copies1").exists()
