"""Free ports are below the ephemeral range and differ."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

import pytest

from shared import ports
from shared.ports import free_port, keep_port
from tests.support.servers import kept_port


def test_ports_are_different_and_not_ephemeral() -> None:
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    picked = [free_port() for _ in range(20)]
    assert len(set(picked)) == 20
    assert max(picked) < ephemeral


def test_processes_with_neighbouring_ids_pick_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many each of them has picked before."""
    picked: list[set[int]] = []
    for pid in range(5_000, 5_005):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        monkeypatch.setattr(ports, "_calls", itertools.count())
        picked.append({free_port() for _ in range(80)})
    assert sum(len(p) for p in picked) == len(set().union(*picked)) == 5 * 80


def test_a_port_in_use_or_avoided_is_not_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, avoided = free_port(), free_port()
    monkeypatch.setattr(ports, "_first_ephemeral", lambda: max(taken, avoided) + 1)
    monkeypatch.setattr(ports, "_FIRST", min(taken, avoided))
    with socket.socket() as server:
        server.bind(("127.0.0.1", taken))
        server.listen()
        for _ in range(30):
            assert free_port(avoid={avoided}) not in {taken, avoided}


def test_a_port_that_is_kept_for_a_server_is_not_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server itself can listen there, and again."""
    with kept_port() as kept:
        port = kept.getsockname()[1]
        monkeypatch.setattr(ports, "_FIRST", port)
        monkeypatch.setattr(ports, "_first_ephemeral", lambda: port + 1)
        assert free_port() != port
        for _ in range(2):
            with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", port))
            assert free_port() != port
    assert free_port() == port


def test_of_processes_that_keep_one_port_at_once_one_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with keep_port() as kept:
        port = kept.getsockname()[1]
        picks = iter((port, free_port()))
        monkeypatch.setattr(ports, "free_port", lambda *_: next(picks))
        with keep_port() as other:
            assert other.getsockname()[1] != port


def test_without_a_free_port_below_the_range_the_kernel_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    only = free_port()
    monkeypatch.setattr(ports, "_FIRST", only)
    monkeypatch.setattr(ports, "_first_ephemeral", lambda: only + 1)
    assert free_port(avoid={only}) != only


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="annot assign"):
        free_port("192.0.2.1")
