"""Checks of the services' settings: whether they are usable, and whether their addresses are free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roster_client.doctor.findings import Finding, State
from roster_client.serve.gateway import gateway_program
from roster_client.serve.taken_addresses import is_taken, served_model
from roster_common.extras import MODULES, missing

ADDRESSES = ("listen", "admin_listen", "link", "metrics_listen", "gateway_listen")


def settings(
    classes: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], list[Finding]]:
    """Reads the settings of both services as they would; returns the usable ones by service, and what was found."""
    usable: dict[str, Any] = {}
    found = []
    for service, cls in classes.items():
        try:
            usable[service] = cls.read(**given[service])
        except ValueError as error:
            found.append(Finding(f"settings of the {service}", State.PROBLEM, str(error)))
        else:
            found.append(Finding(f"settings of the {service}", State.OK, "usable"))
    return usable, found


def ports(scheduler: Any) -> Iterator[Finding]:
    """Checks that the scheduler's addresses are free, or that Roster has them."""
    model = ""
    for name in ADDRESSES:
        address = getattr(scheduler, name)
        if not address:
            continue
        if not is_taken(address.removeprefix("tcp://")):
            yield Finding(name, State.OK, f"{address} is free")
            continue
        model = model or served_model(scheduler.listen)
        if model:
            yield Finding(name, State.NOTE, f"{address}: a service already runs here and serves {model}")
        else:
            todo = f"end that process, or set {name} (ROSTER_{name.upper()})"
            yield Finding(name, State.PROBLEM, f"another process uses {address}", todo)


def gateway(scheduler: Any) -> Finding:
    """Checks what the OpenAI API needs: the gateway's program, and its service in the scheduler."""
    program = gateway_program()
    stubs = not missing(MODULES["openai"])
    if program and stubs:
        target = scheduler.gateway_listen or scheduler.listen
        locked = not scheduler.gateway_listen and (scheduler.tokens or scheduler.tls_cert)
        if locked:
            todo = "set gateway_listen to an address of its own, for example 127.0.0.1:50065"
            return Finding("gateway", State.WARNING, "gateways send neither tokens nor TLS, which listen demands", todo)
        return Finding("gateway", State.OK, f"{program}; it calls the scheduler at {target}")
    absent = [name for name, there in (("smg", program), ("its stubs", stubs)) if not there]
    todo = "pip install 'roster-serve[openai]', if you want the OpenAI API"
    return Finding("gateway", State.NOTE, f"{' and '.join(absent)} not installed: the OpenAI API is off", todo)
