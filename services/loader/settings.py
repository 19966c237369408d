"""Settings of the loader."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from shared.device_list import WantedDevice, parse_devices, separate_devices
from shared.numa import numa_nodes
from shared.settings import NodeSettings


class LoaderSettings(NodeSettings):
    """Settings of the loader.

    The Hugging Face hub has its own variables: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE.
    """

    loader_threads: int = Field(default=4, ge=1, le=64, description="Threads that read from each disk.")
    loader_remote_threads: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Threads, and so connections, that read from each remote host. A load from several nodes divides them among these.",
    )
    loader_order: Literal["fair", "in-order"] = Field(
        default="fair", description="How loads share a disk or a remote host: a chunk each in turn, or one after the other."
    )
    verify: bool = Field(
        default=False,
        description="Compare every tensor of a converted checkpoint with its SHA-256 before a load is complete, and every reused unit of a device "
        "with its own. Costs the hashing of their bytes. Without it a sample of reused units is compared.",
    )
    devices: str = Field(
        default="auto",
        description="As the nodeagent's: the loader owns the memory of cpu devices that are separate, e.g. 'cpu:1=4GiB/separate', or paced for "
        "an experiment, 'cpu:1=4GiB/separate@2GiB/s'.",
    )
    dram_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Host memory for weights that no instance holds (the DRAM cache); by default 15 % of what is available at the start.",
    )
    dram_ready_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Of THAW_DRAM_BYTES: memory populated at the start, so that no load waits for the kernel's zeroing. By default all of it on a "
        "node with GPUs or whose host takes free memory back, and a third elsewhere, populated when nothing has been loaded for ten seconds.",
    )
    cuda_reuse_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Keep weights on GPUs as units that instances share, and that stay after their last instance: at most this many bytes of "
        "those on each GPU, which the sizes in THAW_DEVICES have to leave free. Not yet run on a GPU. By default each load has memory of its own "
        "there, until its last instance ends.",
    )
    cuda_lend_kv: bool = Field(
        default=False,
        description="Lend pages of GPUs that keep units (THAW_CUDA_REUSE_BYTES) to the KV caches of builtin engines, which grow and shrink as on "
        "cpu devices with memory of their own. Not yet run on a GPU. By default each instance there books its whole cache.",
    )
    pretouch: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Touch the free memory of a virtual machine once after boot, in the background at idle priority, and give it back: the host has "
        "then backed it before a load needs it. auto: not where the host takes free memory back, nor on desktops.",
    )
    cache_dir: Path | None = Field(
        default=None,
        description="Directory of copies of remote models, shared by this machine's loaders; by default THAW_HOME/cache.",
    )
    cache_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Maximum bytes of these copies; the least recently used are evicted first. 0: keep none. By default half of what is free on "
        "that disk (and of what the cache has) at the start.",
    )
    peer_host: str = Field(
        default="127.0.0.1",
        description="Address of the server where other nodes' loaders read this one's models; 0.0.0.0: all, advertised as this host's name. "
        "Empty: no server.",
    )
    peer_port: int = Field(default=0, ge=0, le=65535, description="Port of that server; 0: any free one.")
    peers: bool = Field(default=True, description="Read models from other nodes' loaders that have them.")
    cloud_identity: bool = Field(
        default=False,
        description="Ask the cloud's metadata address for the machine's identity where s3://, gs:// or az:// have no credentials (1 s to connect); "
        "false: read anonymously.",
    )

    @field_validator("devices")
    @classmethod
    def _devices(cls, value: str) -> str:
        parse_devices(value)
        return value

    @property
    def separate_devices(self) -> dict[str, WantedDevice]:
        """The cpu devices with memory of their own, by device id."""
        return separate_devices(self.devices, numa_nodes())
