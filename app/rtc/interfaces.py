"""On which of its addresses the service can be reached over WebRTC."""

import aioice.ice


def offer_only(address: str) -> None:
    """Connections that are made from now on use this address alone, which may be a loopback one.

    aioice takes every address of the machine but loopback, and has no other way to be told.
    """

    def host_addresses(use_ipv4: bool, use_ipv6: bool) -> list[str]:
        return [address]

    aioice.ice.get_host_addresses = host_addresses
