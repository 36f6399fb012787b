"""What the settings open to the network: an address beyond loopback needs a lock, or an operator who says `insecure`.

| address                            | lock                                         |
|------------------------------------|----------------------------------------------|
| `listen`                           | TLS                                          |
| `admin_listen`                     | TLS, and client certificates or admin tokens |
| `link`                             | CURVE, where it is TCP                       |
| `gateway_listen`, `metrics_listen` | none: loopback, or a private network         |
"""

from __future__ import annotations

from ipaddress import ip_address

from scheduler_svc.settings.scheduler_settings import SchedulerSettings


def exposed(settings: SchedulerSettings) -> str:
    """Which address would be open to anyone in reach, as a sentence that says what to do; "" if none is."""
    if settings.insecure:
        return ""
    if not is_loopback(settings.listen) and settings.tls_cert is None:
        return _sentence("listen", settings.listen, "set tls_cert and tls_key")
    admin_locked = settings.tls_cert is not None and (settings.admin_tokens or settings.tls_client_ca)
    if settings.admin_listen and not is_loopback(settings.admin_listen) and not admin_locked:
        todo = "set tls_cert, tls_key and admin_tokens (or tls_client_ca)"
        return _sentence("admin_listen", settings.admin_listen, todo)
    if settings.metrics_listen and not is_loopback(settings.metrics_listen):
        return _sentence("metrics_listen", settings.metrics_listen, "it has no lock, put a proxy in front")
    if settings.gateway_listen and not is_loopback(settings.gateway_listen):
        return _sentence("gateway_listen", settings.gateway_listen, "it has no lock, for gateways have no key")
    address = settings.link.removeprefix("tcp://")
    if address != settings.link and not is_loopback(address) and settings.link_key is None:
        return _sentence("link", settings.link, "set link_key and link_runners")
    return ""


def is_loopback(address: str) -> bool:
    """Whether "host:port" is reached from this machine only. Names other than localhost count as the network."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _sentence(setting: str, address: str, todo: str) -> str:
    return (
        f"{setting} is {address}, where anyone in reach could use it: {todo}, or listen on 127.0.0.1, or set insecure "
        "if the network is private by itself"
    )
