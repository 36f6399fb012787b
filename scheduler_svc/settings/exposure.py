"""Network exposure check: an address beyond loopback requires the protection below, or the setting `insecure`.

| address                            | required protection                          |
|------------------------------------|----------------------------------------------|
| `listen`                           | TLS                                          |
| `admin_listen`                     | TLS, and client certificates or admin tokens |
| `link`                             | CURVE, if it is TCP                          |
| `gateway_listen`, `metrics_listen` | none available: only loopback is accepted    |
"""

from __future__ import annotations

from roster_common.endpoints import is_loopback_host
from scheduler_svc.settings.scheduler_settings import SchedulerSettings


def exposed(settings: SchedulerSettings) -> str:
    """Returns a message about the first address exposed to the network without protection, or "" if none is."""
    if settings.insecure:
        return ""
    if not is_loopback(settings.listen) and settings.tls_cert is None:
        return _sentence("listen", settings.listen, "set tls_cert and tls_key")
    admin_locked = settings.tls_cert is not None and (settings.admin_tokens or settings.tls_client_ca)
    if settings.admin_listen and not is_loopback(settings.admin_listen) and not admin_locked:
        todo = "set tls_cert, tls_key and admin_tokens (or tls_client_ca)"
        return _sentence("admin_listen", settings.admin_listen, todo)
    if settings.metrics_listen and not is_loopback(settings.metrics_listen):
        return _sentence("metrics_listen", settings.metrics_listen, "it has no authentication, so put a proxy in front")
    if settings.gateway_listen and not is_loopback(settings.gateway_listen):
        return _sentence("gateway_listen", settings.gateway_listen, "it has neither TLS nor authentication")
    address = settings.link.removeprefix("tcp://")
    if address != settings.link and not is_loopback(address) and settings.link_key is None:
        return _sentence("link", settings.link, "set link_key and link_runners")
    return ""


def is_loopback(address: str) -> bool:
    """Returns whether "host:port" is reachable from this machine only. Host names other than localhost are not."""
    return is_loopback_host(address.rpartition(":")[0])


def _sentence(setting: str, address: str, todo: str) -> str:
    return (
        f"{setting} is {address}, which is open to the network: {todo}, or listen on 127.0.0.1, or set insecure if the "
        "network is private"
    )
