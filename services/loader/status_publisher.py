"""Publish the loader's state: replies to attaches, statuses, and records.

The records are for the next loader.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from services.loader.adapters.peer_sharing import Shared
from services.loader.adapters.records import WeightsRecord
from services.loader.domain.pretouch import Pretouch
from services.loader.domain.state import Entry, Stage, State
from shared.contracts.loader import (
    CachedModel,
    DeviceMemory,
    KvOnDevice,
    LoaderStatus,
    ModelUnits,
    PretouchStatus,
    SegmentStatus,
    WeightsAttached,
    WeightsOnDevice,
)
from shared.contracts.phases import PhaseSpan
from weights.pool.region import extents
from weights.store.usage import PagesInUse


def build_attached(state: State, e: Entry, pool: str, phases: tuple[PhaseSpan, ...]) -> WeightsAttached:
    return WeightsAttached(
        weights_id=e.weights_id,
        segment=pool,
        extents=extents(state.chunks.owned[e.run].chunks, e.total_bytes),
        directory=e.directory,
        total_bytes=e.total_bytes,
        loaded_bytes=e.loaded_bytes,
        phases=phases,
    )


def record(state: State, e: Entry) -> WeightsRecord:
    """Make the record of complete weights.

    Connections are left out: they end with the loader.
    """
    return WeightsRecord(
        weights_id=e.weights_id,
        model=e.model,
        chunks=state.chunks.owned[e.run].chunks,
        directory=e.directory,
        total_bytes=e.total_bytes,
        holders=tuple(i for i, h in e.holders.items() if not h.local),
        source=e.source,
        pinned=e.pinned,
    )


def status(
    state: State, pool: str, node: str, boot_id: str, shared: Shared, on_devices: Callable[[int], dict[str, int]]
) -> LoaderStatus:
    """Build a status.

    Args:
        state: The loader's state.
        pool: Name of the pool.
        node: The node's name.
        boot_id: The identity of this process.
        shared: The part that this node shares with others: disk cache, peers.
        on_devices: Returns the device bytes of a run, by device.
    """
    entries, chunks = state.entries.values(), state.chunks
    cached = tuple(
        CachedModel(weights_id=e.weights_id, tier="dram", nbytes=e.total_bytes, source=e.source)
        for e in entries
        if e.stage is Stage.CACHED
    )
    return LoaderStatus(
        node=node,
        boot_id=boot_id,
        pid=os.getpid(),
        segments=tuple(_segment(e, pool, on_devices(e.run)) for e in entries if e.stage is not Stage.CACHED),
        cached=(*cached, *shared.cached),
        dram_bytes=chunks.cached_bytes + chunks.spare_bytes + chunks.leaving_bytes + chunks.lost_bytes,
        dram_budget_bytes=chunks.budget,
        ssd_bytes=shared.ssd_bytes,
        ssd_budget_bytes=shared.ssd_budget_bytes,
        disk_bytes=shared.disk_bytes,
        disk_free_bytes=shared.disk_free_bytes,
        peer_url=shared.peer_url,
        peer_token=shared.peer_token,
    )


def pretouch(progress: Pretouch) -> PretouchStatus:
    """Make the status of touching the host's memory."""
    return PretouchStatus(state=progress.state, touched_bytes=progress.touched_bytes, reason=progress.reason)


def memory(pages: Iterable[PagesInUse], violations: Mapping[str, tuple[str, ...]]) -> tuple[DeviceMemory, ...]:
    """Make the status of the devices that keep units.

    Args:
        violations: Violations that the latest audit found, by device.
    """
    return tuple(
        DeviceMemory(
            device_id=p.device_id,
            total_bytes=p.total_bytes,
            free_bytes=p.free_bytes,
            mapped_bytes=p.mapped_bytes,
            reusable_bytes=p.reusable_bytes,
            lent_bytes=p.lent_bytes,
            copied_bytes=p.copied_bytes,
            reused_bytes=p.reused_bytes,
            violations=violations.get(p.device_id, ()),
            paced_bytes_per_second=p.paced_bytes_per_second,
            peer_bytes=p.peer_bytes,
            changed_units=p.changed_units,
            numa_node=p.numa_node,
            is_lending=p.is_lending,
            kv=tuple(
                KvOnDevice(
                    instance_id=k.instance_id,
                    model=k.model,
                    floor_bytes=k.floor_bytes,
                    lent_bytes=k.lent_bytes,
                    wanted_bytes=k.wanted_bytes,
                )
                for k in p.kv
            ),
            models=tuple(
                ModelUnits(
                    model=m.model,
                    weights_id=m.weights_id,
                    mapped_bytes=m.mapped_bytes,
                    reusable_bytes=m.reusable_bytes,
                    shared_bytes=m.shared_bytes,
                )
                for m in p.models
            ),
            weights=tuple(WeightsOnDevice(**asdict(w)) for w in p.weights),
        )
        for p in pages
    )


def _segment(e: Entry, pool: str, on_devices: dict[str, int]) -> SegmentStatus:
    return SegmentStatus(
        weights_id=e.weights_id,
        model=e.model,
        segment=pool,
        total_bytes=e.total_bytes,
        loaded_bytes=e.loaded_bytes,
        fetched_bytes=e.fetched_bytes,
        holders=tuple(e.holders),
        error=e.error,
        on_devices=on_devices,
        is_partial=e.device is not None,
    )
