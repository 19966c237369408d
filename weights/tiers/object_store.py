"""Read models of object stores: `s3://`, `gs://` and `az://bucket/prefix`.

obstore lists and signs; Thaw's own connections read the bytes. Where nothing can sign (anonymous
access, tokens without a key) obstore reads the bytes as well.

obstore reads the stores' own variables (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS,
AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, …). Without any it reads anonymously, or asks
the machine's instance metadata if THAW_CLOUD_IDENTITY=true.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.client import HTTPMessage
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shared.errors import CheckpointInvalid, InvalidModel, ThawError, Unavailable
from weights.tiers.http_client import HttpClient
from weights.tiers.names import select
from weights.tiers.port import Cancelled, TierFile
from weights.tiers.ranges import RangeReader, RemoteFile
from weights.tiers.remote import FIRST_BYTES, RemoteTier
from weights.tiers.retry import Backoff

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import AzureConfig, AzureStore, ClientConfig, GCSConfig, GCSStore, RetryConfig, S3Config, S3Store

    Store = S3Store | GCSStore | AzureStore

_SOURCE = re.compile(r"(?P<scheme>s3|gs|az)://(?P<bucket>[a-zA-Z0-9][\w.-]{0,254})(/(?P<prefix>[^?#]*))?")
_SHORTEST_BUCKET = 3
"""Characters; the rule of S3, of Google Cloud Storage and of Azure's containers."""
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_CREDENTIALS = {
    "s3": re.compile(r"AWS_(ACCESS_KEY|WEB_IDENTITY|CONTAINER_CREDENTIALS).*"),
    "gs": re.compile(r"GOOGLE_.*(CREDENTIALS|SERVICE_ACCOUNT|TOKEN).*"),
    "az": re.compile(r"AZURE_.*(KEY|SAS|TOKEN|SECRET|CLI)\b.*"),
}
_GCLOUD = Path("~/.config/gcloud/application_default_credentials.json")
_METADATA_CONNECT = timedelta(seconds=1)
_METADATA_WITHIN = timedelta(seconds=5)
_SIGNED_FOR_S = 3600
_NEW_S = 10.0
"""A younger signature is not renewed if the store refuses it: the reason is another one."""
_AT_ONCE = 8
_PIECE_BYTES = 1024 * 1024
_NOT_FOUND = "status code: 404"
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


def is_object_store(source: str) -> bool:
    return source.startswith(("s3://", "gs://", "az://"))


class ObjectStoreTier(RemoteTier):
    """All objects below one prefix."""

    def __init__(self, source: str, backoff: Backoff | None = None) -> None:
        found = _SOURCE.fullmatch(source)
        if found is None:
            raise InvalidModel(f"{source} is not of the form s3://bucket/prefix (or gs://, az://container/prefix)", param="source")
        if len(found["bucket"]) < _SHORTEST_BUCKET:
            raise InvalidModel(
                f"{source} names the bucket {found['bucket']!r}, which is too short: names have {_SHORTEST_BUCKET} characters or more",
                param="source",
            )
        self._prefix = (found["prefix"] or "").strip("/")
        self._backoff = backoff or Backoff()
        self._store = _open(found["scheme"], found["bucket"], self._backoff)
        self._scheme, self._signs = found["scheme"], True
        client = HttpClient()
        bucket = f"{found['scheme']}://{found['bucket']}"
        place = f"{bucket}/{self._prefix}" if self._prefix else bucket
        super().__init__(place, f"remote:{found['scheme']}:{found['bucket']}", client, RangeReader(client, backoff, _refusal))

    def _list(self) -> list[tuple[TierFile, RemoteFile]]:
        import obstore

        remotes: dict[str, RemoteFile] = {}
        with _Typed(self.source):
            for batch in obstore.list(self._store, self._prefix + "/" if self._prefix else None):
                for meta in batch:
                    name = meta["path"].removeprefix(self._prefix).lstrip("/")
                    remotes[name] = self._remote(name, meta["path"], meta["size"], meta["e_tag"])
        if not remotes:
            raise CheckpointInvalid(f"{self.source} holds nothing; correct bucket and prefix, or copy the model there")
        sizes = {name: remote.size or 0 for name, remote in remotes.items()}
        wanted = select(sizes, self.source, lambda name: self._content(remotes[name]))
        # Headers are wanted next in any case, and the answers carry checksums that the listing does
        # not.
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="probe") as pool:
            heads = dict(zip(wanted, pool.map(lambda name: self._head(remotes[name]), wanted), strict=True))
        self._first.update({name: data for name, data in heads.items() if data})
        return [
            (TierFile(n, sizes[n], remotes[n].validator or "", md5=stored_md5(remotes[n].headers, self._scheme)), remotes[n])
            for n in wanted
        ]

    def _remote(self, name: str, path: str, size: int, e_tag: str | None) -> RemoteFile:
        # Azure's listing leaves out the quotes that its answers' headers have.
        quoted = f'"{e_tag}"' if e_tag and not e_tag.startswith(('"', "W/")) else e_tag
        signed = _Signed(self._store, path)
        return RemoteFile(signed, f"{self.source}/{name}", size, quoted, key=path, renew=signed.renew)

    def _head(self, remote: RemoteFile) -> bytes:
        length = min(FIRST_BYTES, remote.size or 0)
        data = bytearray(length)
        self._fill(remote, 0, memoryview(data), None)
        return bytes(data)

    def _content(self, remote: RemoteFile) -> bytes:
        data = bytearray(remote.size or 0)
        self._fill(remote, 0, memoryview(data), None)
        return bytes(data)

    def read(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> None:
        _, remote = self._known(file)
        first = self._first.get(file.name, b"")
        if offset + len(into) <= len(first):
            into[:] = first[offset : offset + len(into)]
        else:
            self._fill(remote, offset, into, cancelled)

    def _fill(self, remote: RemoteFile, offset: int, into: memoryview, cancelled: threading.Event | None) -> None:
        if self._signs:
            try:
                remote.url()
            except _Unsigned:
                self._signs = False
        if self._signs:
            self._reader.read(remote, offset, into, cancelled)
        else:
            self._fill_unsigned(remote, offset, into, cancelled)

    def _fill_unsigned(self, remote: RemoteFile, offset: int, into: memoryview, cancelled: threading.Event | None) -> None:
        """Read by obstore, which retries requests; this continues a body that breaks off."""
        import obstore
        from obstore.exceptions import GenericError

        done = failures = 0
        while done < len(into):
            begun = done
            try:
                with _Typed(remote.where):
                    options: GetOptions = {"range": (offset + done, offset + len(into)), "if_match": remote.validator}
                    for piece in obstore.get(self._store, remote.key, options=options).stream(min_chunk_size=_PIECE_BYTES):
                        if cancelled is not None and cancelled.is_set():
                            raise Cancelled
                        with memoryview(piece) as data:
                            into[done : done + len(data)] = data
                            done += len(data)
                        failures = 0
                if done == begun:
                    raise Unavailable(f"{remote.where}: the store sent no bytes; check it and the proxy", should_retry=True)
            except Unavailable as e:
                failures += 1
                is_final = e.__cause__ is not None and not isinstance(e.__cause__, GenericError)
                if failures >= self._backoff.attempts or is_final:
                    raise
                self._backoff.pause(failures, None, cancelled)


class _Unsigned(Exception):
    """The credentials at hand cannot sign URLs."""


class _Signed:
    """The signed URL of one object, renewed before it expires."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path
        self._url, self._until, self._since = "", 0.0, 0.0

    def renew(self) -> bool:
        """Make the next call sign the URL again; return False if the signature is new."""
        if time.monotonic() - self._since < _NEW_S:
            return False
        self._until = 0.0
        return True

    def __call__(self) -> str:
        import obstore
        from obstore.exceptions import BaseError

        if time.monotonic() >= self._until:
            try:
                self._url = obstore.sign(self._store, "GET", self._path, timedelta(seconds=_SIGNED_FOR_S))
            except (BaseError, ValueError) as e:
                raise _Unsigned from e
            self._since = time.monotonic()
            self._until = self._since + _SIGNED_FOR_S / 2
        return self._url


def _open(scheme: str, bucket: str, backoff: Backoff) -> Store:
    from obstore.store import AzureStore, GCSStore, S3Store

    retry: RetryConfig = {"max_retries": backoff.attempts - 1, "retry_timeout": timedelta(seconds=60)}
    endpoint = next((v for v in map(os.environ.get, _ENDPOINTS[scheme]) if v), "")
    # Plain HTTP only where the operator names such an endpoint.
    client: ClientConfig = {"allow_http": True} if urlsplit(endpoint).scheme == "http" else {}
    anonymous = False
    if not _has_credentials(scheme):
        if os.environ.get("THAW_CLOUD_IDENTITY", "").lower() in ("1", "true", "yes", "on"):
            client["connect_timeout"] = _METADATA_CONNECT
            retry = {"max_retries": 1, "retry_timeout": _METADATA_WITHIN}
        else:
            anonymous = True
    try:
        if scheme == "s3":
            s3: S3Config = {"endpoint": endpoint} if endpoint else {}
            if anonymous:
                s3["skip_signature"] = True
            return S3Store(bucket, config=s3, client_options=client, retry_config=retry)
        if scheme == "gs":
            gs: GCSConfig = {"skip_signature": True} if anonymous else {}
            return GCSStore(bucket, config=gs, client_options=client, retry_config=retry)
        az: AzureConfig = {"skip_signature": True} if anonymous else {}
        return AzureStore(bucket, config=az, client_options=client, retry_config=retry)
    except Exception as e:  # obstore's builders raise errors of several kinds for variables that cannot be meant
        raise InvalidModel(f"{scheme}://{bucket} cannot be opened: {_shorten(e)}; check the credentials' variables") from e


def _has_credentials(scheme: str) -> bool:
    """True if the operator has given the loader credentials for that kind of store."""
    named = any(value and _CREDENTIALS[scheme].fullmatch(name) for name, value in os.environ.items())
    return named or (scheme == "gs" and _GCLOUD.expanduser().is_file())


def stored_md5(headers: HTTPMessage | None, scheme: str) -> str | None:
    """Return the MD5 of a whole object, in hexadecimal, from a response's headers.

    None if the store sends none. Google: x-goog-hash. Azure: x-ms-blob-content-md5. S3: the ETag of
    an object that was put in one part, unless a key encrypts it.
    """
    if headers is None:
        return None
    for value in headers.get_all("x-goog-hash") or ():
        for part in value.split(","):
            if part.strip().startswith("md5="):
                return _hex(part.strip().removeprefix("md5="))
    if azure := headers.get("x-ms-blob-content-md5"):
        return _hex(azure)
    by_key = headers.get("x-amz-server-side-encryption", "AES256") != "AES256" or any(
        name.lower().startswith("x-amz-server-side-encryption-customer") for name in headers
    )
    found = _MD5.fullmatch(headers.get("ETag", ""))
    return found[1] if found and scheme == "s3" and not by_key else None


def _hex(encoded: str) -> str | None:
    try:
        return base64.b64decode(encoded, validate=True).hex()
    except binascii.Error:
        return None


class _Typed:
    """obstore's errors as ours."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from obstore import exceptions as e

        where = self._where
        # Listing a bucket that does not exist is obstore's GenericError: only its message
        # identifies it.
        if isinstance(error, e.NotFoundError) or (isinstance(error, e.BaseError) and _NOT_FOUND in str(error)):
            raise CheckpointInvalid(f"{where} is not there; correct bucket and prefix, or copy the model there") from error
        if isinstance(error, (e.PermissionDeniedError, e.UnauthenticatedError)):
            raise _refusal(where, 403) from error
        if isinstance(error, e.PreconditionError):
            raise CheckpointInvalid(
                f"{where} has changed since it was listed; register the model again (thaw models add)"
            ) from error
        if isinstance(error, e.BaseError):
            raise Unavailable(
                f"{where} cannot be reached ({_shorten(error)}); check network, endpoint and credentials", should_retry=True
            ) from error


def _refusal(where: str, status: int) -> ThawError:
    if status in (404, 410):
        return CheckpointInvalid(f"{where} is not there ({status}); correct bucket and prefix, or copy the model there")
    return InvalidModel(
        f"{where}: the store refuses access ({status}); give the loader credentials that may list and read it, "
        "or set THAW_CLOUD_IDENTITY=true where the machine itself may"
    )


def _shorten(error: BaseException) -> str:
    """The first line of an error, without what obstore prints of its own state."""
    text = str(error).strip()
    return (text.splitlines() or [type(error).__name__])[0][:200]
