"""compose.yaml as data: each service's command, environment and published ports in a profile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+):-(?P<default>[^}]*)\})")


@dataclass(frozen=True, slots=True)
class ComposeService:
    """One service: its command, its environment, and host ports by container port."""

    name: str
    command: list[str]
    environment: dict[str, str]
    ports: dict[int, int]
    networks: dict[str, list[str]]
    """Its networks, each with the service's aliases there."""
    built: bool
    """Whether its image is built from this repository."""

    @property
    def aliases(self) -> list[str]:
        """Its aliases on all networks."""
        return [alias for aliases in self.networks.values() for alias in aliases]


def read_compose(path: Path, profile: str, variables: Mapping[str, str]) -> list[ComposeService]:
    """Returns the services that `--profile PROFILE` starts, those without a profile first, with variables filled in."""
    document = yaml.safe_load(_interpolate(path.read_text("utf-8"), variables))
    chosen = {
        name: service for name, service in document["services"].items() if profile in service.get("profiles", [profile])
    }
    ordered = sorted(chosen, key=lambda name: "profiles" in chosen[name])
    return [_service(name, chosen[name]) for name in ordered]


def compose_variables(path: Path) -> dict[str, str]:
    """Returns the file's variables with their defaults. Raises ValueError if a variable has several."""
    found: dict[str, str] = {}
    for match in _VARIABLE.finditer(path.read_text("utf-8")):
        if match["name"] and found.setdefault(match["name"], match["default"]) != match["default"]:
            raise ValueError(f"{match['name']} has the defaults {found[match['name']]} and {match['default']}")
    return found


def _service(name: str, service: dict[str, Any]) -> ComposeService:
    published = [port.split(":") for port in service.get("ports", [])]
    return ComposeService(
        name=name,
        command=list(service.get("command", [])),
        environment={key: str(value or "") for key, value in service.get("environment", {}).items()},
        ports={int(parts[-1]): int(parts[-2]) for parts in published},
        networks=_networks(service.get("networks", ["default"])),
        built="build" in service,
    )


def _networks(networks: list[str] | dict[str, dict[str, list[str]] | None]) -> dict[str, list[str]]:
    """Converts either form of a service's networks to aliases by network."""
    if isinstance(networks, list):
        return {name: [] for name in networks}
    return {name: (own or {}).get("aliases", []) for name, own in networks.items()}


def _interpolate(text: str, variables: Mapping[str, str]) -> str:
    if left := re.search(r"\$\S*", _VARIABLE.sub("", text)):
        raise ValueError(f"{left.group()} has an unsupported form: write ${{NAME:-default}}, or $$ for $")

    def fill(match: re.Match[str]) -> str:
        return match["dollar"] or variables.get(match["name"]) or match["default"]

    return _VARIABLE.sub(fill, text)
