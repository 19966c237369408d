"""Settings of the gateway."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator

from shared.contracts.openai import MAX_BIASES
from shared.contracts.stream_limits import KEYED_REPLIES_BYTES
from shared.settings import CommonSettings

Exposure = Literal["auto", "open", "key", "off"]


class GatewaySettings(CommonSettings):
    """Settings of the gateway; docs/configuration.md is generated from them."""

    gateway_host: str = Field(default="127.0.0.1", description="Address that the endpoint listens on.")
    gateway_port: int = Field(default=8080, ge=0, le=65535, description="Port that the endpoint listens on; 0: any free port.")
    gateway_socket: int | None = Field(
        default=None, description="File descriptor of an inherited listening socket, used instead of host and port."
    )
    max_body_bytes: int = Field(
        default=100 * 1024 * 1024,
        ge=1024,
        description="Largest HTTP body in bytes. Above the size of a NATS message: only forms, and base64 in JSON, for hosted engines.",
    )
    max_body_values: int = Field(
        default=160 * 1024,
        ge=1024,
        description="Maximum cost of a JSON body; above it the gateway answers 413. A value costs 1, a member of an object 8, "
        "an array or object 32, text nothing.",
    )
    max_prompts: int = Field(default=2048, ge=1, description="Maximum prompts of a completion, or inputs of an embedding request.")
    max_choices: int = Field(default=1024, ge=1, description="Maximum choices of a request: its prompts times n (or best_of).")
    max_messages: int = Field(default=2048, ge=1, description="Maximum messages of a chat.")
    max_content_parts: int = Field(default=4096, ge=1, description="Maximum content parts of all messages of a chat.")
    max_tools: int = Field(default=512, ge=1, description="Maximum tools of a chat.")
    max_stops: int = Field(default=64, ge=1, description="Maximum stop strings and stop token ids of a request.")
    max_logit_biases: int = Field(default=1024, ge=1, le=MAX_BIASES, description="Maximum entries of logit_bias.")
    max_open_bytes: int = Field(
        default=512 * 1024 * 1024,
        ge=1024 * 1024,
        description="Maximum bytes of active requests in the gateway; above it the gateway answers 429.",
    )
    max_open_bytes_per_key: int = Field(
        default=128 * 1024 * 1024,
        ge=1024 * 1024,
        description="The same per API key, or per address for clients without a valid key.",
    )
    max_open_bytes_per_model: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024, description="The same per model.")
    max_held_bytes: int = Field(
        default=1024 * 1024 * 1024,
        ge=0,
        description="Maximum bytes of active requests whose bodies exceed a NATS message. They are in files of the gateway's state directory. "
        "Above it 429. 0: such bodies are refused.",
    )
    max_held_bytes_per_key: int = Field(
        default=512 * 1024 * 1024, ge=0, description="The same per API key, or per address for clients without a valid key."
    )
    body_timeout: float = Field(default=120.0, gt=0, description="Seconds that the body of a request may take.")
    max_connections: int = Field(
        default=16384,
        ge=1,
        description="Maximum open connections; above it the gateway answers 503. The limit of open files applies too.",
    )
    max_connections_per_address: int = Field(
        default=4096, ge=1, description="Maximum open connections of one address (an IPv6 network of 64 bits is one); above it 429."
    )
    trusted_proxies: str = Field(
        default="",
        description="Addresses and networks (as 10.0.0.0/8) of proxies in front of the gateway, comma-separated. A request from one has the "
        "client address in its X-Forwarded-For header. Empty: the header is ignored.",
    )
    max_header_bytes: int = Field(
        default=32 * 1024,
        ge=1024,
        description="Maximum bytes of a request line with its headers; above it 431.",
    )
    max_headers: int = Field(default=100, ge=8, description="Maximum headers of a request; above it 431.")
    header_timeout: float = Field(
        default=20.0, gt=0, description="Seconds that the headers of a request, or the first byte of a connection, may take."
    )
    idle_timeout: int = Field(
        default=75, ge=1, description="Seconds that an idle connection stays open; longer than clients keep theirs."
    )
    write_timeout: float = Field(
        default=120.0, gt=0, description="Seconds after which a client that reads nothing of its response is disconnected."
    )
    allowed_hosts: str = Field(
        default="",
        description="Allowed names in the Host header, comma-separated, besides this machine's own on loopback; *: all.",
    )
    metrics_access: Exposure = Field(
        default="auto",
        description="Access to /metrics: open, key (any inference or admin key) or off; auto: open on loopback, else key.",
    )
    openapi_access: Exposure = Field(default="auto", description="Access to /openapi.json: as THAW_METRICS_ACCESS.")
    waking_comment_after: float = Field(
        default=5.0, gt=0, description="Seconds without a token after which a stream gets SSE comments about its model's start."
    )
    waking_comment_interval: float = Field(default=3.0, gt=0, description="Seconds between these comments.")
    jaeger_url: str = Field(
        default="",
        pattern=r"^(https?://\S+[^/\s])?$",
        description="Address of Jaeger's page for browsers, without a slash at the end: the console's traces are links to it.",
    )
    usage_headers: bool = Field(
        default=False,
        description="Responses say what they used: the header x-thaw-usage, or a comment in streams (docs/metering.md).",
    )
    keep_alive_interval: float = Field(
        default=15.0, gt=0, description="Seconds of silence after which a stream gets a keep-alive comment."
    )
    stream_buffer_bytes: int = Field(
        default=8 * 1024 * 1024,
        ge=64 * 1024,
        description="Maximum bytes buffered for a client that reads more slowly than its model generates; above it the request fails.",
    )
    starting_timeout: float = Field(
        default=30.0,
        ge=0,
        description="Seconds that a request waits for a gateway that is starting to read its state from NATS; then 503. "
        "A client's few retries must last through a restart of NATS.",
    )
    drain_timeout: float = Field(default=30.0, ge=0, description="Seconds that active requests may take to finish after SIGTERM.")
    published_address: str = Field(
        default="",
        description="Host address that a container's port is published on, as 127.0.0.1. It decides whether the endpoint is reachable beyond "
        "loopback. Empty: the address that the gateway listens on decides.",
    )
    admin_key: SecretStr | None = Field(
        default=None,
        description="Bearer key of the admin API. Unset: beyond loopback the admin API is disabled, and on loopback it accepts no admin keys, "
        "commands or code.",
    )
    api_keys: SecretStr | None = Field(
        default=None,
        description="SHA-256 hashes (hex) of inference keys, comma-separated; require_key says when a key is needed.",
    )
    api_keys_file: Path | None = Field(
        default=None, description="File with one such hash per line (`#` starts a comment); read again when it changes."
    )
    require_key: bool | None = Field(
        default=None,
        description="true: inference always needs a key. false: only while a key exists. Unset: once a key has existed, and always beyond "
        "loopback.",
    )
    idempotency_ttl: float = Field(
        default=24 * 3600.0, gt=0, description="Seconds that the response to an Idempotency-Key is stored."
    )
    idempotency_bytes: int = Field(
        default=KEYED_REPLIES_BYTES,
        ge=1024 * 1024,
        description="Maximum bytes of stored responses; above it the oldest are removed.",
    )
    responses_per_key: int = Field(
        default=256,
        ge=0,
        description="Maximum stored responses of /v1/responses for each API key; above it the oldest are removed. 0: none are stored.",
    )
    responses_bytes_per_key: int = Field(
        default=16 * 1024 * 1024, ge=1024, description="Maximum bytes of the stored responses of each API key; above it the same."
    )
    responses_ttl: float = Field(default=24 * 3600.0, ge=1, description="Seconds that a response is stored.")
    max_file_bytes: int = Field(default=64 * 1024 * 1024, ge=1024, description="Largest file of /v1/files in bytes; above it 413.")
    files_per_key: int = Field(
        default=200, ge=0, le=2000, description="Maximum files of each API key, results of batches included. 0: no uploads."
    )
    files_bytes_per_key: int = Field(
        default=128 * 1024 * 1024,
        ge=1024,
        description="Maximum bytes of the files of each API key; above it uploads and batches are refused. The results of one batch "
        "may have as many.",
    )
    files_ttl: float = Field(
        default=7 * 24 * 3600.0, ge=2 * 24 * 3600, description="Seconds that a file is stored; at least two days."
    )
    batches_per_key: int = Field(default=8, ge=0, description="Maximum batches of each API key that have not ended.")
    batch_max_requests: int = Field(default=50_000, ge=1, le=100_000, description="Maximum requests of a batch.")
    batch_concurrency: int = Field(
        default=16,
        ge=1,
        description="Maximum requests of all batches that are sent at once. Those that wait for their model do not count.",
    )
    batch_start_after_idle: float = Field(
        default=60.0,
        ge=0,
        description="A batch starts its model only if all instances of a device have been idle for so many seconds, or a device has none. "
        "0: always.",
    )
    simulation_timeout: float = Field(
        default=300.0, ge=1, description="Longest time of a simulation that the console starts, in seconds, of processor time too."
    )
    simulation_bytes: int = Field(
        default=1024**3, ge=256 * 1024**2, description="Maximum address space of a simulation's process, in bytes."
    )
    cors_origins: str = Field(default="", description="Allowed origins of web pages, comma-separated; *: all; empty: none.")
    tls_certificate: Path | None = Field(default=None, description="PEM certificate chain; with it the endpoint uses HTTPS.")
    tls_key: Path | None = Field(default=None, description="PEM private key of the certificate.")

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, value: str) -> str:
        """Check that each part is an address or a network, and return all as networks."""
        return ",".join(str(ip_network(part.strip(), strict=False)) for part in value.split(",") if part.strip())

    @field_validator("require_key", mode="before")
    @classmethod
    def _unset(cls, value: Any) -> Any:
        """Treat an empty variable as unset: compose passes unset variables as empty."""
        return None if value == "" else value
