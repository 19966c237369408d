"""Loads LoRA adapters into a hosted engine from copies of their files.

An engine reads an adapter's files again when it has evicted the adapter from its own memory, and
vLLM may end if they are missing or changed by then. So each adapter is copied into a directory of
this host, which exists while the adapter is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.enginehost.drivers.port import Driver
from services.enginehost.http1 import Client
from shared.contracts.models import ModelCard
from shared.errors import InsufficientMemory, ThawError, Unavailable

log = logging.getLogger(__name__)
FILES = ("adapter_config.json", "adapter_model.safetensors")
_ATTEMPTS = 2
"""The loader's disk cache may evict the files before they are copied."""


class AdapterSlots:
    """The `AdapterRoom` of an engine that holds a fixed number of adapters."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    @property
    def budget(self) -> int:
        return self._budget

    def size_of(self, card: ModelCard) -> int:
        return 1

    def on_used(self, used: int) -> None:
        """No-op: the slots are for adapters alone."""

    def refuse(self, card: ModelCard) -> InsufficientMemory:
        return InsufficientMemory(f"This instance of {card.spec.base} has no room for adapters")


class HostedAdapterSource:
    """The `AdapterSource` of a hosted engine. An adapter is its name in requests to the engine.

    Args:
        driver: The engine's driver.
        client: Client of the engine.
        fetch: Has an adapter's files on this node's disk, and returns their directory. Raises
            `ThawError`.
        make_directory: Makes an empty directory that only this user may enter. Raises `OSError`.
    """

    def __init__(
        self,
        driver: Driver,
        client: Client,
        fetch: Callable[[ModelCard], Awaitable[Path]],
        make_directory: Callable[[], Path],
    ) -> None:
        self._driver, self._client = driver, client
        self._fetch, self._make_directory = fetch, make_directory
        self._directory: Path | None = None
        self._names: dict[str, asyncio.Lock] = {}

    async def load(self, card: ModelCard, number: int) -> str:
        """Load an adapter; another revision of the same name is unloaded first.

        Raises:
            ThawError: The files cannot be fetched or copied, or the engine refuses them.
        """
        name = card.name
        await self._names.setdefault(name, asyncio.Lock()).acquire()
        try:
            directory = self._make_directory_of(number)
            await self._copy_files(card, directory)
            await self._driver.load_adapter(self._client, name, directory)
        except BaseException:
            self._remove(number)
            self._names[name].release()
            raise
        return name

    async def drop(self, adapter: str, number: int) -> None:
        try:
            await self._driver.unload_adapter(self._client, adapter)
        except ThawError as e:
            log.warning("failed to unload an adapter", extra={"adapter": adapter, "error": e.message})
        finally:
            self._remove(number)
            self._names[adapter].release()

    def close(self) -> None:
        """Remove all copies, after the engine has ended."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def _copy_files(self, card: ModelCard, directory: Path) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            source = await self._fetch(card)
            try:
                await asyncio.to_thread(_copy, source, directory)
                return
            except FileNotFoundError as e:
                if attempt == _ATTEMPTS:
                    raise Unavailable(f"The files of the adapter {card.name} disappeared from {source} ({e.filename})") from e
            except OSError as e:
                raise Unavailable(f"The files of the adapter {card.name} cannot be copied to {directory}: {e.strerror}") from e

    def _make_directory_of(self, number: int) -> Path:
        try:
            if self._directory is None:
                self._directory = self._make_directory()
            directory = self._directory / str(number)
            directory.mkdir()
            return directory
        except OSError as e:
            raise Unavailable(f"No directory for adapters can be made: {e}") from e

    def _remove(self, number: int) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory / str(number), ignore_errors=True)


def _copy(source: Path, directory: Path) -> None:
    for name in FILES:
        shutil.copyfile(source / name, directory / name)
