"""`http(s)://host/path/`: a model's files below one URL of any web server.

Nothing in HTTP lists files. A file SHA256SUMS beside them (`sha256sum * > SHA256SUMS`) names all,
with checksums; without one the names that a model in Hugging Face layout can have are asked for one
by one. Credentials are those of the URL, or of ~/.netrc (NETRC).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import netrc
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from shared.errors import CheckpointInvalid, InvalidModel
from weights.formats.checkpoint import MAX_JSON_BYTES
from weights.tiers.http_client import HttpClient, basic, redact_url
from weights.tiers.names import PROBED, check_limit, is_safe, is_small, weights_of
from weights.tiers.port import TierFile
from weights.tiers.ranges import RangeReader, RemoteFile
from weights.tiers.remote import FIRST_BYTES, RemoteTier
from weights.tiers.retry import Backoff

log = logging.getLogger(__name__)
SUMS = "SHA256SUMS"
_SUM = re.compile(r"(?P<sha256>[0-9a-fA-F]{64}) [ *](\./)?(?P<name>.+)")
_LIKE_SUM = re.compile(r"[0-9a-fA-F]{40,}\s.*|.* = [0-9a-fA-F]{40,}")
_AT_ONCE = 8


def is_http(source: str) -> bool:
    return source.startswith(("http://", "https://"))


class HttpTier(RemoteTier):
    """A model on an HTTP server.

    Args:
        source: URL of its directory. User, password and query (a signature) are never shown.
        backoff: Waiting times between attempts.
    """

    def __init__(self, source: str, backoff: Backoff | None = None) -> None:
        try:
            parts = urlsplit(source)
            host, _ = parts.hostname, parts.port
        except ValueError as e:  # the address is not repeated: it may have a password
            raise InvalidModel(
                "The source is not of the form https://host/path: its host or port is invalid", param="source"
            ) from e
        if not is_http(source) or not host:
            raise InvalidModel(f"{redact_url(source)} is not of the form https://host/path", param="source")
        self._refusals: list[InvalidModel] = []
        self._base = parts._replace(path=parts.path.rstrip("/"), fragment="")
        client = HttpClient(_credentials(host) if parts.username is None else None)
        name = f"remote:{host}" + (f":{parts.port}" if parts.port else "")
        super().__init__(redact_url(urlunsplit(self._base)), name, client, RangeReader(client, backoff))

    def _list(self) -> list[tuple[TierFile, RemoteFile]]:
        sums = self._sums()
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="probe") as pool:

            def ask(names: Iterable[str]) -> dict[str, RemoteFile]:
                return {name: file for name, file in pool.map(self._probe, names) if file is not None}

            if sums:
                found = ask(sums)
                if missing := sorted(set(sums) - set(found)):
                    raise CheckpointInvalid(f"{self.source}/{missing[0]} is named by {SUMS} but missing; the source is incomplete")
                weights = weights_of(found, self.source, self._make_small_reader(found))
                wanted = [n for n, f in found.items() if n in weights or is_small(n, f.size or 0)]
            else:
                found = ask(PROBED)
                if not found and self._refusals:
                    raise self._refusals[0]
                weights = weights_of(found, self.source, self._make_small_reader(found))
                found |= ask(name for name in weights if name not in found)
                wanted = [n for n in found if n in weights or not n.endswith(".safetensors")]
        for name in weights:
            if name not in found:
                raise CheckpointInvalid(f"{self.source}/{name} is named by the model's index but missing; the source is incomplete")
        return [(self._tier_file(name, found[name], sums.get(name)), found[name]) for name in wanted]

    def _tier_file(self, name: str, file: RemoteFile, sha256: str | None) -> TierFile:
        # Without ETag and date the first bytes (a header, a whole configuration) must distinguish
        # versions.
        version = file.validator or f"first:{hashlib.sha256(self._first.get(name, b'')).hexdigest()}"
        return TierFile(name, file.size or 0, version, sha256)

    def _sums(self) -> dict[str, str]:
        """The names and checksums in SHA256SUMS; none if there is no such file.

        Raises:
            CheckpointInvalid: One of its lines is malformed, or a name is a path.
        """
        try:
            data = self._reader.head(self._remote(SUMS), MAX_JSON_BYTES)
        except InvalidModel as e:
            self._refusals.append(e)
            return {}
        if data is None:
            return {}
        lines = [line for line in data.decode("utf-8", "replace").splitlines() if line.strip() and not line.startswith("#")]
        found = [m for line in lines if (m := _SUM.fullmatch(line)) is not None]
        if not found and not any(_LIKE_SUM.fullmatch(line) for line in lines):
            if lines:  # a page that says "no such file", with status 200
                log.warning("SHA256SUMS has no checksums; files are not verified", extra={"file": f"{self.source}/{SUMS}"})
        elif len(found) < len(lines):
            malformed = next(line for line in lines if _SUM.fullmatch(line) is None)
            raise CheckpointInvalid(
                f"{self.source}/{SUMS} has a malformed line, {malformed[:100]!r}: make it again with `sha256sum * > {SUMS}`"
            )
        sums = {m["name"]: m["sha256"].lower() for m in found if m["name"] != SUMS}
        if unsafe := [name for name in sums if not is_safe(name)]:
            raise CheckpointInvalid(f"{self.source}/{SUMS} names {unsafe[0]!r}: only plain names beside it are allowed")
        return sums

    def _probe(self, name: str) -> tuple[str, RemoteFile | None]:
        file = self._remote(name)
        try:
            data = self._reader.head(file, FIRST_BYTES)
        except InvalidModel as e:  # object stores say 403 of what is not there, to those who may not list
            self._refusals.append(e)
            return name, None
        if data is None:
            return name, None
        self._first[name] = data
        return name, file

    def _make_small_reader(self, found: dict[str, RemoteFile]) -> Callable[[str], bytes]:
        def read(name: str) -> bytes:
            size = found[name].size or 0
            check_limit(name, size, self.source)
            if len(known := self._first.get(name, b"")) == size:
                return known
            data = bytearray(size)
            self._reader.read(found[name], 0, memoryview(data))
            return bytes(data)

        return read

    def _remote(self, name: str) -> RemoteFile:
        url = urlunsplit(self._base._replace(path=f"{self._base.path}/{quote(name)}"))
        return RemoteFile(lambda: url, f"{self.source}/{name}")


def _credentials(host: str) -> dict[str, str]:
    """Return the credentials of ~/.netrc, if it has this host."""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        found = netrc.netrc(str(path)).authenticators(host)
        if found is not None:
            return {"Authorization": basic(quote(found[0]), quote(found[2] or ""))}
    return {}
