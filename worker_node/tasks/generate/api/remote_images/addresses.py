"""Which addresses a host on the internet may have. Pure."""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv6Address

# Gateways of these networks send what comes to the IPv4 address in the last 32 bits.
_TRANSLATED = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
_COMPATIBLE = ipaddress.IPv6Network("::/96")
# All that is given out for the public internet, and in it what is for examples: Python 3.11 takes more for global.
_GIVEN_OUT = ipaddress.IPv6Network("2000::/3")
_EXAMPLES = ipaddress.IPv6Network("3fff::/20")
# The third quarter of an ISATAP address; the IPv4 address that it is for comes after it.
_ISATAP = {0x00005EFE, 0x02005EFE}


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet: not private, loopback, link-local, multicast or reserved.

    An IPv6 address that carries an IPv4 address is public if that is. What is no address is not public.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address):
        carried = _carried(parsed)
        if carried:
            return all(_is_global(inner) for inner in carried)
    return _is_global(parsed)


def _carried(address: IPv6Address) -> tuple[IPv4Address, ...]:
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    if address.teredo is not None:
        return address.teredo
    if address in _COMPATIBLE or any(address in network for network in _TRANSLATED):
        return (IPv4Address(int(address) & 0xFFFFFFFF),)
    if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
        return (IPv4Address(int(address) & 0xFFFFFFFF),)
    return ()


def _is_global(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and (address not in _GIVEN_OUT or address in _EXAMPLES):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
