"""Availability of the service for OpenAI gateways. Needs the extra `openai`.

| `gateway_listen` | served at          | protected by                         |
|------------------|--------------------|--------------------------------------|
| ''               | `listen`           | TLS and tokens of `listen`           |
| an address       | that address only  | nothing: restrict access by network  |

`smg` sends no tokens to its workers and does not connect over TLS. If the public API requires either, the gateway's
service needs an address of its own.
"""

from __future__ import annotations

from roster_common.extras import MODULES, missing
from scheduler_svc.settings.scheduler_settings import SchedulerSettings


class GatewayUnavailable(ValueError):
    """`gateway_listen` is set, but the packages are missing."""


def gateway_is_served() -> bool:
    """Returns whether the gateway's packages are installed."""
    return not missing(MODULES["openai"])


def check_gateway(settings: SchedulerSettings) -> None:
    """Raises GatewayUnavailable if `gateway_listen` is set but the packages of the extra `openai` are missing.

    The scheduler calls this function at startup, so that the error is raised there and not in a worker.
    """
    if settings.gateway_listen and not gateway_is_served():
        raise GatewayUnavailable(
            "gateway_listen requires the gateway's stubs: install them with `pip install 'roster-serve[openai]'`, or "
            "remove gateway_listen"
        )
