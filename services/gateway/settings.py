"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator

from shared.contracts.openai import MAX_BIASES
from shared.messaging.bounds import KEYED_REPLIES_BYTES
from shared.settings import CommonSettings

Exposure = Literal["auto", "open", "key", "off"]


class GatewaySettings(CommonSettings):
    gateway_host: str = Field(default="127.0.0.1", description="Address that the endpoint listens on.")
    gateway_port: int = Field(default=8080, ge=0, le=65535, description="Port that the endpoint listens on; 0: any free one.")
    gateway_socket: int | None = Field(
        default=None, description="File descriptor of a listening socket that was inherited, instead of host and port."
    )
    max_body_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=1024,
        description="Largest HTTP body taken; what one NATS message may carry bounds it too.",
    )
    max_body_values: int = Field(
        default=160 * 1024,
        ge=1024,
        description="Most values in a JSON body; beyond 413. A member of an object counts as 8, an array or object as 32, text as nothing.",
    )
    max_prompts: int = Field(default=2048, ge=1, description="Most prompts of a completion, or inputs of an embedding request.")
    max_choices: int = Field(default=1024, ge=1, description="Most choices of a request: its prompts times n (or best_of).")
    max_messages: int = Field(default=2048, ge=1, description="Most messages of a chat.")
    max_content_parts: int = Field(default=4096, ge=1, description="Most content parts of all messages of a chat together.")
    max_tools: int = Field(default=512, ge=1, description="Most tools of a chat.")
    max_stops: int = Field(default=64, ge=1, description="Most stop strings and stop token ids of a request.")
    max_logit_biases: int = Field(default=1024, ge=1, le=MAX_BIASES, description="Most entries of logit_bias.")
    max_open_bytes: int = Field(
        default=512 * 1024 * 1024,
        ge=1024 * 1024,
        description="Bytes of open requests (read, waiting, being answered) that a gateway holds; beyond it answers 429.",
    )
    max_open_bytes_per_key: int = Field(
        default=128 * 1024 * 1024, ge=1024 * 1024, description="The same for one API key, or one address that comes without a key."
    )
    max_open_bytes_per_model: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024, description="The same for one model.")
    body_timeout: float = Field(default=120.0, gt=0, description="Seconds that the body of a request may take to arrive.")
    max_connections: int = Field(
        default=16384, ge=1, description="Most open connections; beyond 503. The limit of open files bounds it too."
    )
    max_connections_per_address: int = Field(default=4096, ge=1, description="Most open connections of one address; beyond 429.")
    max_header_bytes: int = Field(default=32 * 1024, ge=1024, description="Most bytes of a request's line and headers; beyond 431.")
    max_headers: int = Field(default=100, ge=8, description="Most headers of a request; beyond 431.")
    header_timeout: float = Field(
        default=20.0, gt=0, description="Seconds that a request's headers may take to arrive, and a new connection its first byte."
    )
    idle_timeout: int = Field(
        default=75, ge=1, description="Seconds that a connection stays open between requests; longer than clients keep theirs."
    )
    write_timeout: float = Field(
        default=120.0, gt=0, description="Seconds without a byte taken by a client that is being written to; then it is cut off."
    )
    allowed_hosts: str = Field(
        default="",
        description="Names in the Host header that are served, comma-separated, besides this machine's own on loopback; *: all.",
    )
    metrics_access: Exposure = Field(
        default="auto", description="/metrics: open, key (any inference or admin key), off; auto: open on loopback, else key."
    )
    openapi_access: Exposure = Field(default="auto", description="/openapi.json: as metrics_access.")
    waking_comment_after: float = Field(
        default=5.0, gt=0, description="Seconds without a token after which a stream gets SSE comments about what it waits for."
    )
    waking_comment_interval: float = Field(default=3.0, gt=0, description="Seconds between such comments.")
    keep_alive_interval: float = Field(
        default=15.0, gt=0, description="Seconds of silence in a stream after which a comment is sent."
    )
    stream_buffer_bytes: int = Field(
        default=8 * 1024 * 1024,
        ge=64 * 1024,
        description="Bytes kept for a client that reads slower than its model writes; beyond, it fails.",
    )
    starting_timeout: float = Field(
        default=30.0,
        ge=0,
        description="Seconds that a request may wait while this gateway, just started, waits for NATS; then 503. "
        "A client's few retries are to last through a restart of NATS.",
    )
    drain_timeout: float = Field(default=30.0, ge=0, description="Seconds that open requests may take to finish after SIGTERM.")
    published_address: str = Field(
        default="",
        description="Address of the host that a container's port is published on, as 127.0.0.1: whether the endpoint is beyond loopback is told "
        "by it. Empty: by the address that the gateway listens on.",
    )
    admin_key: SecretStr | None = Field(
        default=None,
        description="Bearer key of the admin API. None: beyond loopback the admin API is off, and on loopback it takes no admin keys, commands or "
        "code.",
    )
    api_keys: SecretStr | None = Field(
        default=None,
        description="SHA-256 hashes (hex) of the keys that may infer, comma-separated; with api_keys_file none, all may.",
    )
    api_keys_file: Path | None = Field(
        default=None, description="File with one such hash a line (`#` starts a comment); read again when it changes."
    )
    require_key: bool | None = Field(
        default=None,
        description="true: inference always needs a key. false: only while there is one. Unset: once there has been one, and always beyond "
        "loopback.",
    )
    idempotency_ttl: float = Field(default=24 * 3600.0, gt=0, description="Seconds that the answer to an Idempotency-Key is kept.")
    idempotency_bytes: int = Field(
        default=KEYED_REPLIES_BYTES, ge=1024 * 1024, description="Bytes kept of such answers; beyond, the oldest go first."
    )
    cors_origins: str = Field(
        default="", description="Origins whose pages may call the endpoint, comma-separated; *: all; empty: none."
    )
    tls_certificate: Path | None = Field(default=None, description="PEM certificate chain; with it the endpoint speaks HTTPS.")
    tls_key: Path | None = Field(default=None, description="PEM private key of the certificate.")

    @field_validator("require_key", mode="before")
    @classmethod
    def _unset(cls, value: Any) -> Any:
        """An empty variable is as good as none: compose passes those that are not set on so."""
        return None if value == "" else value
