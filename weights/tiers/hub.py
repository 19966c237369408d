"""Read models of the Hugging Face hub: `hf://org/name[@revision]`.

A model is pinned to a commit; HF_ENDPOINT may name another hub. huggingface_hub lists sizes and
SHA-256 of every file at a commit; the bytes are read by ranges, as from any other server. Complete
models in its own cache (HF_HOME, HF_HUB_CACHE) are used from there. Its variables apply: HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.errors import CheckpointInvalid, InvalidModel, ThawError, Unavailable
from weights.tiers.directory import DirectoryTier
from weights.tiers.http_client import HttpClient
from weights.tiers.names import select
from weights.tiers.port import Tier, TierFile
from weights.tiers.ranges import RangeReader, RemoteFile
from weights.tiers.remote import RemoteTier
from weights.tiers.retry import Backoff

_SOURCE = re.compile(r"hf://(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ANSWER_S = 30.0
"""Seconds without a byte after which the listing is given up; huggingface_hub has no limit."""


def is_hub(source: str) -> bool:
    return source.startswith("hf://")


def parse_hub(source: str) -> tuple[str, str | None]:
    """(repository, revision or None). Raises `InvalidModel`."""
    found = _SOURCE.fullmatch(source)
    if found is None:
        raise InvalidModel(f"{source} is not of the form hf://org/name[@revision]", param="source")
    return found["repo"], found["revision"]


def open_hub(source: str, backoff: Backoff | None = None) -> Tier:
    """Open the model at its commit, from huggingface_hub's cache or the hub.

    The cache is used if it has the whole model.

    Raises:
        InvalidModel: The hub has no such name.
        Unavailable: The hub is unreachable and the cache does not have the model.
    """
    repo, revision = parse_hub(source)
    if is_offline() or (revision is not None and _COMMIT.fullmatch(revision)):
        if (cached := _snapshot(repo, revision)) is not None:
            return cached
        if is_offline():
            raise Unavailable(
                f"{source} is not complete in the local cache, and HF_HUB_OFFLINE is set: unset it or download the model first"
            )
    try:
        commit, listing = _ask(repo, revision)
    except Unavailable:
        if (cached := _snapshot(repo, revision)) is not None:
            return cached
        raise
    return _snapshot(repo, commit) or HubTier(repo, commit, listing, backoff)


class HubTier(RemoteTier):
    """One repository at one commit.

    Args:
        listing: Name, size, and SHA-256 where the hub has one, of each file.
    """

    def __init__(self, repo: str, commit: str, listing: list[tuple[str, int, str | None]], backoff: Backoff | None = None) -> None:
        from huggingface_hub.utils import build_hf_headers

        self._repo, self._commit, self._files_there = repo, commit, listing
        endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        headers = {k: v for k, v in build_hf_headers().items() if k.lower() == "authorization"}
        client = HttpClient(headers)
        host = urlsplit(endpoint).netloc.rpartition("@")[2]
        super().__init__(
            f"hf://{repo}@{commit}", f"remote:{host}", client, RangeReader(client, backoff, partial(_make_refusal, f"hf://{repo}"))
        )

    @property
    def revision(self) -> str:
        return hub_revision(self._repo, self._commit)

    def _list(self) -> list[tuple[TierFile, RemoteFile]]:
        remotes = {name: self._remote(name, size) for name, size, _ in self._files_there}
        sizes = {name: size for name, size, _ in self._files_there}
        sums = {name: sha256 for name, _, sha256 in self._files_there}

        def content(name: str) -> bytes:
            data = bytearray(sizes[name])
            self._reader.read(remotes[name], 0, memoryview(data))
            return bytes(data)

        wanted = select(sizes, f"hf://{self._repo}", content)
        return [(TierFile(n, sizes[n], self._commit, sums[n]), remotes[n]) for n in wanted]

    def _remote(self, name: str, size: int) -> RemoteFile:
        from huggingface_hub import hf_hub_url

        url: str = hf_hub_url(self._repo, name, revision=self._commit, endpoint=os.environ.get("HF_ENDPOINT"))
        return RemoteFile(lambda: url, f"hf://{self._repo}@{self._commit[:12]}/{name}", size)


def hub_revision(repo: str, commit: str) -> str:
    """Return the revision of a commit, which is the same on every node.

    A commit fixes every byte; a directory's revision depends on the node.
    """
    return hashlib.sha256(f"hub\0{repo}\0{commit}".encode()).hexdigest()[:32]


def is_offline() -> bool:
    return any(os.environ.get(v, "").upper() in ("1", "ON", "YES", "TRUE") for v in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _ask(repo: str, revision: str | None) -> tuple[str, list[tuple[str, int, str | None]]]:
    from huggingface_hub import HfApi

    with _typed(repo, revision):
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        try:
            info = api.model_info(repo, revision=revision, files_metadata=True, timeout=_ANSWER_S)
        except (TypeError, AttributeError) as e:  # it parses the JSON of any server
            raise ValueError("not a hub's description of a model") from e
        if not isinstance(info.sha, str):
            raise ValueError("no commit")
        files = [(f.rfilename, f.size or 0, getattr(f.lfs, "sha256", None)) for f in info.siblings or ()]
    return info.sha, files


def _snapshot(repo: str, revision: str | None) -> Tier | None:
    """huggingface_hub's own copy, if it is whole."""
    from huggingface_hub import constants, try_to_load_from_cache

    for name in ("config.json", "adapter_config.json"):
        found = try_to_load_from_cache(repo, name, cache_dir=constants.HF_HUB_CACHE, revision=revision)
        if isinstance(found, str):
            directory = Path(found).parent
            break
    else:
        return None
    commit = directory.name
    tier = DirectoryTier(directory, source=f"hf://{repo}@{commit}", revision=hub_revision(repo, commit))
    try:
        tier.files()
    except CheckpointInvalid:  # the small files only, or weights that are still being downloaded
        return None
    return tier


def _make_refusal(where: str, _file: str, status: int) -> ThawError:
    if status in (404, 410):
        return InvalidModel(f"{where}: the hub does not have it ({status}): correct the name or the revision")
    return InvalidModel(f"{where}: the hub refuses access ({status}): accept its terms on its page, and set a valid HF_TOKEN")


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
    except errors.HFValidationError as e:
        raise InvalidModel(f"{where} is not a valid repository name: {e}", param="source") from e
    except errors.HfHubHTTPError as e:
        raise _http_error(where, e) from e
    except (httpx2.HTTPError, OSError) as e:
        raise Unavailable(
            f"{where} is not complete in the local cache, and the hub cannot be reached ({type(e).__name__}): check network, proxy and "
            "HF_ENDPOINT",
            should_retry=True,
        ) from e
    except (ValueError, KeyError) as e:  # a proxy's page, for example
        raise Unavailable(
            f"{where} is not complete in the local cache, and the server that answered is not a hub ({type(e).__name__}): "
            "check HF_ENDPOINT and the proxy",
            should_retry=True,
        ) from e


def _http_error(where: str, e: Any) -> InvalidModel | Unavailable:
    status = e.response.status_code
    if status in (401, 403):
        return InvalidModel(f"{where}: the hub refuses access ({status}): set a valid HF_TOKEN for the loader")
    if status == 404:
        return InvalidModel(f"{where}: the hub does not have it (404): correct the name or the revision")
    return Unavailable(f"{where}: the hub answered {status}; try again later", should_retry=True)
