"""Which addresses count as one client in limits."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

_IPV6_NETWORK_BITS = 64
"""The smallest network that an IPv6 client usually has: it can use every address in it."""
_MAPPED_BITS = 96


@lru_cache(4096)
def client_of_address(address: str) -> str:
    """Return the client that an address belongs to: an IPv4 address, or an IPv6 network.

    Anything else, as the empty address of a Unix socket, is a client of its own.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_NETWORK_BITS), strict=False))


def trusted_peers(networks: str) -> str:
    """Add the IPv4-mapped form of each IPv4 network, as a socket for both IP versions has it.

    Args:
        networks: Comma-separated.
    """
    found = []
    for network in map(ipaddress.ip_network, filter(None, networks.split(","))):
        found.append(str(network))
        if isinstance(network, ipaddress.IPv4Network):
            found.append(f"::ffff:{network.network_address}/{_MAPPED_BITS + network.prefixlen}")
    return ",".join(found)
