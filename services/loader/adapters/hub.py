"""`hf://org/name[@revision]`: models of the Hugging Face hub, or of what HF_ENDPOINT names, through huggingface_hub and its cache.

Inspecting downloads the small files only and reads the weights' headers by HTTP ranges; the weights come when they are first loaded.
huggingface_hub's own variables hold: HF_TOKEN, HF_ENDPOINT, HF_HOME / HF_HUB_CACHE, HF_HUB_OFFLINE, and the usual proxy variables.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.loader.tiers.port import Cancelled
from services.loader.format.checkpoint import (
    INDEX,
    Checkpoint,
    WeightFile,
    check_files,
    open_checkpoint,
    parse_index,
    read_small,
    weight_names,
)
from services.loader.format.inspect import check_small_files, describe
from services.loader.format.safetensors import read_header
from shared.contracts.models import ModelInfo
from shared.errors import CheckpointInvalid, InvalidModel, Unavailable

_SOURCE = re.compile(r"hf://(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "1_Pooling/*.json")
CODE_FILES = ("*.py",)
_FIRST_BYTES = 100_000
"""Fetched with the first range: nearly every header fits (huggingface_hub measured 97 %)."""
_TIMEOUT_S = 20.0


def is_hub(source: str) -> bool:
    return source.startswith("hf://")


@dataclass(frozen=True)
class HubSource:
    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, source: str) -> HubSource:
        found = _SOURCE.fullmatch(source)
        if found is None:
            raise InvalidModel(f"{source} is not of the form hf://org/name[@revision]", param="source")
        return cls(found["repo"], found["revision"])

    def inspect(self, *, trust_remote_code: bool) -> ModelInfo:
        with _typed(self.repo, self.revision):
            directory = self._snapshot(_patterns(trust_remote_code))
            commit, sizes = directory.name, self._listed(directory)
            architecture, _ = check_small_files(directory, sizes, trust_remote_code=trust_remote_code)
            names, weight_map = self._weights(directory, sizes)
            if _offline() or all((directory / name).exists() for name in names):
                checkpoint = open_checkpoint(directory)
            else:
                files = tuple(self._remote_file(directory, name, sizes) for name in names)
                checkpoint = Checkpoint(directory, check_files(weight_map, files, f"hf://{self.repo}"))
        # A commit fixes every byte: unlike a directory's, this revision is the same on every node.
        revision = hashlib.sha256(f"hub\0{self.repo}\0{commit}".encode()).hexdigest()[:32]
        return describe(f"hf://{self.repo}@{commit}", revision, architecture, checkpoint, directory, sizes)

    def fetch(self, on_fetched: Callable[[int], None], cancelled: threading.Event, *, trust_remote_code: bool) -> Path:
        with _typed(self.repo, self.revision):
            # Small files first: they tell which of the repository's weight files are wanted.
            directory = self._snapshot(_patterns(trust_remote_code))
            names, _ = self._weights(directory, self._listed(directory))
            if all((directory / name).exists() for name in names):
                return directory
            wanted = (*_patterns(trust_remote_code), *map(_literal, names))
            return self._snapshot(wanted, _progress(on_fetched, cancelled))

    def small_file(self, name: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, name, revision=self.revision)
        return Path(found) if isinstance(found, str) else None

    def _snapshot(self, patterns: tuple[str, ...], progress: type[Any] | None = None) -> Path:
        """The snapshot's directory, which is named by its commit. Without a network, what the cache has."""
        from huggingface_hub import snapshot_download

        found: str = snapshot_download(
            self.repo,
            revision=self.revision,
            allow_patterns=list(patterns),
            endpoint=os.environ.get("HF_ENDPOINT"),
            local_files_only=_offline(),
            tqdm_class=progress or _progress(lambda _: None, threading.Event()),
        )
        return Path(found)

    def _listed(self, directory: Path) -> dict[str, int]:
        """Sizes of the repository's files at the snapshot's commit, as huggingface_hub noted when it made the snapshot."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            return {f.path: f.size for f in get_cached_repo_tree(self.repo, revision=directory.name)}
        except CachedRepoTreeNotFoundError:  # a snapshot of an older huggingface_hub
            return {p.name: p.stat().st_size for p in directory.iterdir() if p.is_file()}

    def _weights(self, directory: Path, present: Collection[str]) -> tuple[tuple[str, ...], dict[str, str] | None]:
        """Names of the weight files, and the index's tensor → file map if there is one."""
        names = weight_names(present, f"hf://{self.repo}")
        if names is not None:
            return names, None
        weight_map = parse_index(read_small(directory / INDEX), f"hf://{self.repo}/{INDEX}")
        return tuple(sorted(set(weight_map.values()))), weight_map

    def _remote_file(self, directory: Path, name: str, sizes: Mapping[str, int]) -> WeightFile:
        where = f"hf://{self.repo}@{directory.name[:12]}/{name}"
        if name not in sizes:
            raise CheckpointInvalid(f"{where} is named by {INDEX} but missing; the repository is incomplete, take another revision")
        read = _RemoteFile(self.repo, directory.name, name).read
        return WeightFile(name, directory / name, sizes[name], read_header(where, sizes[name], read))


class _RemoteFile:
    """Ranged reads of one file of the hub; the first one is kept, as headers mostly fit into it."""

    def __init__(self, repo: str, commit: str, name: str) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        self._url = hf_hub_url(repo, name, revision=commit, endpoint=os.environ.get("HF_ENDPOINT"))
        self._headers = build_hf_headers()
        self._first: bytes | None = None

    def read(self, offset: int, length: int) -> bytes:
        if self._first is None:
            self._first = self._get(0, _FIRST_BYTES)
        if offset + length <= len(self._first):
            return self._first[offset : offset + length]
        return self._get(offset, length)

    def _get(self, offset: int, length: int) -> bytes:
        from huggingface_hub import get_session
        from huggingface_hub.utils import hf_raise_for_status

        headers = {**self._headers, "Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        # Streamed, so that a server that ignores the range does not have us take in the whole file.
        with get_session().stream("GET", self._url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            skip = 0 if response.status_code == 206 else offset
            data = bytearray()
            for part in response.iter_bytes():
                data += part
                if len(data) >= skip + length:
                    break
        return bytes(data[skip : skip + length])


def _patterns(trust_remote_code: bool) -> tuple[str, ...]:
    return (*SMALL_FILES, *CODE_FILES) if trust_remote_code else SMALL_FILES


def _literal(name: str) -> str:
    """A file name as a pattern that matches nothing else."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _offline() -> bool:
    return any(os.environ.get(v, "").upper() in ("1", "ON", "YES", "TRUE") for v in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _progress(on_fetched: Callable[[int], None], cancelled: threading.Event) -> type[Any]:
    """A progress bar class that draws nothing, reports bytes, and ends the download when it is called off."""
    from huggingface_hub.utils import tqdm

    lock = threading.Lock()
    most = 0

    class Progress(tqdm):  # type: ignore[misc]  # huggingface_hub is not followed by mypy here (see pyproject)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._bytes = kwargs.get("unit") == "B"
            self._seen = 0
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            if cancelled.is_set():
                raise Cancelled
            if self._bytes:
                with lock:
                    self._seen += int(n or 0)
                    more = self._seen > most
                    most = max(most, self._seen)
                if more:
                    on_fetched(most)
            return None

    return Progress


@contextmanager
def _typed(repo: str, revision: str | None) -> Iterator[None]:
    """huggingface_hub's errors as ours, each with its remedy."""
    import httpx2
    from huggingface_hub import errors

    where = f"hf://{repo}" + (f"@{revision}" if revision else "")
    try:
        yield
    except errors.GatedRepoError as e:
        raise InvalidModel(f"{where} is gated: accept its terms on its page and set HF_TOKEN for the loader") from e
    except errors.RevisionNotFoundError as e:
        raise InvalidModel(f"{where}: no such revision; name a branch, a tag or a commit of {repo}") from e
    except errors.RepositoryNotFoundError as e:
        raise InvalidModel(
            f"{where}: no such repository, or it is private: correct the name, or set HF_TOKEN for the loader"
        ) from e
    except errors.LocalEntryNotFoundError as e:
        if isinstance(e.__cause__, errors.HfHubHTTPError):  # the hub did answer
            raise _http_error(where, e.__cause__) from e
        if _offline():
            raise Unavailable(
                f"{where} is not (whole) in the local cache and HF_HUB_OFFLINE is set: unset it or download it first"
            ) from e
        raise Unavailable(
            f"{where} is not (whole) in the local cache and the hub cannot be reached: check network, proxy and HF_ENDPOINT"
        ) from e
    except errors.HFValidationError as e:
        raise InvalidModel(f"{where} is not a valid repository name: {e}", param="source") from e
    except errors.HfHubHTTPError as e:
        raise _http_error(where, e) from e
    except httpx2.HTTPError as e:
        raise Unavailable(
            f"{where}: the hub cannot be reached ({type(e).__name__}): check network, proxy and HF_ENDPOINT", should_retry=True
        ) from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Unavailable(f"{where}: no space left for the download: free some, or set HF_HOME to a larger disk") from e
        raise Unavailable(f"{where} could not be downloaded: {e}") from e


def _http_error(where: str, e: Any) -> InvalidModel | Unavailable:
    status = e.response.status_code
    if status in (401, 403):
        return InvalidModel(f"{where}: the hub refuses access ({status}): set a valid HF_TOKEN for the loader")
    if status == 404:
        return InvalidModel(f"{where}: the hub does not have it (404): correct the name or the revision")
    return Unavailable(f"{where}: the hub answered {status}; try again later", should_retry=True)
