"""A gateway gets tokenizer files from a real loader."""

from __future__ import annotations

from pathlib import Path

from services.gateway.adapters.prompt_length import TokenCounter
from services.gateway.adapters.tokenizer_files import TokenizerFiles
from tests.integration.loader.conftest import Client, LoaderProcess, client, loader, loader_environment, loader_module
from thaw.demo.tokenizer import write_tokenizer

__all__ = ["client", "loader", "loader_environment", "loader_module"]


async def test_files_of_a_model_on_another_machine(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    write_tokenizer(directory, 2048, 2048)
    await client.until_served()
    files = TokenizerFiles(client.mesh, lambda: ["nobody", loader.node])
    got = await files.read(_elsewhere(directory))
    assert got["tokenizer.json"] == (directory / "tokenizer.json").read_bytes()
    assert TokenCounter.from_files(got) is not None
    assert await files.read(str(tmp_path / "nothing")) == {}


def _elsewhere(directory: Path) -> str:
    """Return a source that the gateway does not take for a local path.

    The loader expands the `~`.
    """
    return "~/" + str(Path("../" * len(Path.home().parts)) / str(directory).lstrip("/"))
