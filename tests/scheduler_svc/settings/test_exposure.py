"""Settings that expose an unprotected address to the network are refused; others are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_svc.settings.exposure import exposed, is_loopback
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

TLS = {"tls_cert": "cert.pem", "tls_key": "key.pem"}
CURVE = {"link_key": "scheduler.key", "link_runners": "runners"}
EVERYWHERE = {"listen": "0.0.0.0:1", "admin_listen": "0.0.0.0:2", "link": "tcp://*:3"}


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "*:1", "eth0:1", "example.org:1", ":1"])
def test_not_loopback(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"listen": "0.0.0.0:1"}, "listen is"),
        ({"admin_listen": "0.0.0.0:1"}, "admin_listen is"),
        ({"metrics_listen": "0.0.0.0:1"}, "metrics_listen is"),
        ({"admin_listen": "0.0.0.0:1", **TLS}, "admin_listen is"),
        ({"admin_listen": "0.0.0.0:1", "admin_tokens": "tokens"}, "admin_listen is"),
        ({"link": "tcp://0.0.0.0:1"}, "link is"),
        ({"link": "tcp://*:1", **TLS}, "link is"),
    ],
)
def test_what_is_refused(settings: dict[str, str], setting: str) -> None:
    reason = exposed(SchedulerSettings(**settings))
    assert reason.startswith(setting) and "set insecure if the network is private" in reason


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"listen": "0.0.0.0:1", **TLS},
        {"admin_listen": ""},
        {"admin_listen": "0.0.0.0:1", **TLS, "admin_tokens": "tokens"},
        {"admin_listen": "0.0.0.0:1", **TLS, "tls_client_ca": "ca.pem"},
        {"link": "tcp://0.0.0.0:1", **CURVE},
        {"link": "ipc:///run/roster"},
        {**EVERYWHERE, "insecure": True},
        {**EVERYWHERE, **TLS, **CURVE, "admin_tokens": "tokens"},
    ],
)
def test_what_is_not(settings: dict[str, object]) -> None:
    assert exposed(SchedulerSettings(**settings)) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tls_cert": "cert.pem"}, "tls_cert and tls_key belong together"),
        ({"tls_client_ca": "ca.pem"}, "tls_client_ca requires TLS: set tls_cert and tls_key too"),
        ({"link_key": "key"}, "link_key and link_runners"),
        ({"link_runners": "runners"}, "link_key and link_runners"),
    ],
)
def test_settings_that_belong_together(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SchedulerSettings(**{name: Path(value) for name, value in settings.items()})  # type: ignore[arg-type]
