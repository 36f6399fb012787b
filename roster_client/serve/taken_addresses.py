"""Refuses to start services at addresses that are in use, before anything starts."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping
from dataclasses import asdict

from roster_client.client.errors import RosterError
from roster_client.client.sync_client import SyncRosterClient
from roster_client.options.connection import credentials
from roster_client.serve.stack import Endpoints
from roster_common.endpoints import LETTING_GO_S, check_free


class AddressTaken(ValueError):
    """An address is in use; the message says by what, and what to do."""


def refuse_taken(endpoints: Endpoints, gateway_listen: str = "") -> None:
    """Raises AddressTaken if another process listens at one of the addresses. Waits for a service that was killed."""
    addresses = {**asdict(endpoints), "gateway_listen": gateway_listen}
    deadline = time.monotonic() + LETTING_GO_S
    while (taken := _first_taken(addresses)) is not None:
        setting, address = taken
        if served := served_model(endpoints.listen):
            raise AddressTaken(
                f"another service runs at {endpoints.listen} ({served}): use it, stop it, or start this one with "
                "--free-ports"
            )
        if time.monotonic() > deadline:
            raise AddressTaken(
                f"{setting} is {address}, which another process uses: stop that process, set {setting} to a free "
                "address, or use --free-ports"
            )
        time.sleep(0.1)


def _first_taken(addresses: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns the setting and the address of the first that is taken, or None."""
    taken = ((setting, address) for setting, address in addresses.items() if is_taken(address.removeprefix("tcp://")))
    return next(taken, None)


def is_taken(address: str) -> bool:
    """Returns whether a TCP address is in use; False for one that the service will refuse."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or port == "0":
        return False
    try:
        check_free("" if host == "*" else host.strip("[]"), int(port))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    except OverflowError:  # a port above 65,535
        return False
    return False


def served_model(listen: str) -> str:
    """Returns the name of the model that a Roster service serves at an address, or "" if none answers."""
    try:
        with SyncRosterClient(listen, credentials=credentials()) as client:
            return client.get_model(deadline_s=1).name
    except (RosterError, ValueError):
        return ""
