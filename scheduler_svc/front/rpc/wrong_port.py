"""Answers calls that reach another listener than the one that serves them: the sentence says which port is meant."""

from __future__ import annotations

from typing import Any

import grpc
import structlog

from scheduler_svc.front.base.refusal import refusing, unimplemented
from scheduler_svc.front.rpc.health import ADMIN_SERVICE, INFERENCE_SERVICE
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

GATEWAY_SERVICE = "vllm.grpc.engine.VllmEngine"
GATEWAY_IS_OFF = "the service for OpenAI gateways is off: run pip install 'roster-serve[openai]' and restart"

_HERE = {
    "listen": "that is the clients' port",
    "admin_listen": "that is the operators' port",
    "gateway_listen": "that is the gateways' port",
}

log = structlog.get_logger(__name__)


class ServedElsewhere(grpc.GenericRpcHandler):
    """Refuses calls to the services of other listeners with UNIMPLEMENTED, as gRPC does, and a sentence.

    The sentence needs no token, so a listener that requires one names no other listener's address.
    """

    def __init__(self, listener: str, settings: SchedulerSettings, gateway_is_served: bool) -> None:
        """`listener`: the setting of the address that this server listens on."""
        locked = {"listen": settings.tokens, "admin_listen": settings.admin_tokens}.get(listener) is not None

        def at(setting: str) -> str:
            known = getattr(settings, setting)
            return f"the address of the setting {setting}" if locked else f"{known} (the setting {setting})"

        clients = f"clients call {at('listen')}"
        operators = f"operators call {at('admin_listen')}"
        if not settings.admin_listen:
            operators = "the admin API is off (the setting admin_listen is '')"
        gateways = f"gateways call {at('gateway_listen' if settings.gateway_listen else 'listen')}"
        here = _HERE[listener]
        self._sentences = {
            INFERENCE_SERVICE: f"{here}; {clients}",
            ADMIN_SERVICE: f"{here}; {operators}",
            GATEWAY_SERVICE: f"{here}; {gateways}" if gateway_is_served else GATEWAY_IS_OFF,
        }
        served = {"listen": INFERENCE_SERVICE, "admin_listen": ADMIN_SERVICE, "gateway_listen": GATEWAY_SERVICE}
        del self._sentences[served[listener]]
        if listener == "listen" and gateway_is_served and not settings.gateway_listen:
            del self._sentences[GATEWAY_SERVICE]
        self._warned = False

    @property
    def services(self) -> tuple[str, ...]:
        """Names of the services that other listeners have."""
        return tuple(self._sentences)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Returns a handler that refuses the call; None for services that no listener has."""
        sentence = self._sentences.get(handler_call_details.method.strip("/").partition("/")[0])
        if sentence is None:
            return None
        if sentence == GATEWAY_IS_OFF and not self._warned:
            self._warned = True
            log.warning("a gateway calls, but its service is off", advice=GATEWAY_IS_OFF)
        return refusing(unimplemented("", sentence))
