"""What the settings of moves have to agree on."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Protocol

from roster_common.endpoints import is_loopback_host, split_address


class MoveSettings(Protocol):
    """Settings of a runner that moves depend on."""

    @property
    def move_listen(self) -> str: ...
    @property
    def move_transport(self) -> str: ...
    @property
    def move_network(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def runner_key(self) -> Path | None: ...


def check_moves(settings: MoveSettings) -> None:
    """Raises ValueError for settings that contradict one another, or would carry KV past CURVE unasked."""
    if settings.role != "both" and not settings.move_listen:
        raise ValueError(f"role {settings.role!r} needs move_listen: without it no sequence can move to or from here")
    is_local = not settings.move_listen or is_loopback_host(split_address(settings.move_listen, "127.0.0.1:50065")[0])
    if not is_local and settings.runner_key is None:
        raise ValueError(
            f"move_listen is {settings.move_listen!r}, which other machines reach: set runner_key and scheduler_key, "
            "which encrypt moves, or listen on 127.0.0.1"
        )
    if settings.move_network:
        try:
            network = ip_network(settings.move_network)
        except ValueError as error:
            raise ValueError(f"move_network is no network: {error}; write it as 10.1.0.0/16, for example") from error
        if settings.move_listen and not _may_be_in(split_address(settings.move_listen, "10.1.0.7:50065")[0], network):
            raise ValueError(
                f"move_listen is {settings.move_listen!r}, which is not in move_network, {settings.move_network!r}: "
                "listen on this machine's address there"
            )
    if settings.move_transport == "nixl":
        _check_nixl(settings, is_local)


def _may_be_in(host: str, network: IPv4Network | IPv6Network) -> bool:
    """Whether a host is in the network; of names and wildcards that is not known yet."""
    try:
        address = ip_address(host)
    except ValueError:
        return True
    return address.is_unspecified or address in network


def _check_nixl(settings: MoveSettings, is_local: bool) -> None:
    if not settings.move_listen:
        raise ValueError("move_transport is nixl, but move_listen is not set: without it nothing moves")
    if not is_local and not settings.move_network:
        raise ValueError(
            f"move_transport is nixl, which does not encrypt, and move_listen is {settings.move_listen!r}: state as "
            "move_network the network that only trusted machines reach, or listen on 127.0.0.1"
        )
