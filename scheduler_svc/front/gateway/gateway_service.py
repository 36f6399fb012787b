"""Where the service that OpenAI gateways speak is served. Needs the extra `openai`.

| `gateway_listen` | served at   | behind                       |
|------------------|-------------|------------------------------|
| ''               | `listen`    | TLS and tokens of `listen`   |
| an address       | there alone | nothing: the network is it   |

`smg` sends no token to its workers and connects to none over TLS, so a public API that asks for either takes the
address of its own.
"""

from __future__ import annotations

from importlib.util import find_spec

from scheduler_svc.settings.scheduler_settings import SchedulerSettings

STUBS = "smg_grpc_proto"
"""The module without which no gateway is served."""


class GatewayUnavailable(ValueError):
    """`gateway_listen` is set and the packages are missing."""


def gateway_is_served() -> bool:
    """Whether the packages are there."""
    return find_spec(STUBS) is not None


def check_gateway(settings: SchedulerSettings) -> None:
    """Raises GatewayUnavailable when an address is set and the packages are missing: at the start, not in a worker."""
    if settings.gateway_listen and not gateway_is_served():
        raise GatewayUnavailable(
            "gateway_listen needs the gateway's stubs: install them with `pip install 'roster-serve[openai]'`, or "
            "leave it out"
        )
