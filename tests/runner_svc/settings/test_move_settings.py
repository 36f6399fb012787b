"""What the settings of moves admit: listening beyond loopback needs keys, and a role needs an address."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from runner_svc.settings.runner_settings import RunnerSettings

KEYS = {"runner_key": Path("a.key"), "scheduler_key": Path("b.pub")}


@pytest.mark.parametrize("address", ["0.0.0.0:50067", "[::]:50067", "10.0.0.7:50067", "runner-1:50067"])
def test_moves_beyond_loopback_need_keys(address: str) -> None:
    with pytest.raises(ValidationError, match=r"move_listen is .*set runner_key and scheduler_key"):
        RunnerSettings(move_listen=address)  # type: ignore[call-arg]
    assert RunnerSettings(move_listen=address, **KEYS).move_listen == address  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:50067", "[::1]:50067", ""])
def test_loopback_needs_none(address: str) -> None:
    assert RunnerSettings(move_listen=address).move_listen == address  # type: ignore[call-arg]


def test_a_role_needs_an_address() -> None:
    for role in ("prefill", "decode"):
        with pytest.raises(ValidationError, match=f"role '{role}' needs move_listen"):
            RunnerSettings(role=role)  # type: ignore[call-arg]
        assert RunnerSettings(role=role, move_listen="127.0.0.1:0").role == role  # type: ignore[call-arg]


def test_an_address_has_a_port() -> None:
    with pytest.raises(ValidationError, match="is not an address"):
        RunnerSettings(move_listen="127.0.0.1")  # type: ignore[call-arg]


def test_nixl_stays_on_loopback_or_on_a_stated_network() -> None:
    settings = {"move_transport": "nixl", **KEYS}
    with pytest.raises(ValidationError, match="move_transport is nixl, but move_listen is not set"):
        RunnerSettings(**settings)  # type: ignore[arg-type]
    for address in ("10.1.0.7:50067", "0.0.0.0:50067"):
        with pytest.raises(ValidationError, match=r"nixl, which does not encrypt, .*state as move_network"):
            RunnerSettings(move_listen=address, **settings)  # type: ignore[arg-type]
        assert RunnerSettings(move_listen=address, move_network="10.1.0.0/16", **settings)  # type: ignore[arg-type]
    assert RunnerSettings(move_listen="127.0.0.1:0", **settings)  # type: ignore[arg-type]


def test_a_network_is_one_and_has_the_address() -> None:
    with pytest.raises(ValidationError, match=r"move_network is no network: .*write it as"):
        RunnerSettings(move_network="10.1.0.7/16")  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="which is not in move_network"):
        RunnerSettings(move_listen="10.2.0.7:1", move_network="10.1.0.0/16", **KEYS)  # type: ignore[arg-type]
