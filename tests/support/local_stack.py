"""compose.yaml's services without Docker: the same commands in the same environment, as processes on loopback.

Services with third-party images (Prometheus, Grafana) are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from roster_client.serve.free_ports import free_ports
from tests.support.compose_file import ComposeService, read_compose

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 60.0
PORTS = (50061, 50062, 50063, 50064, 50065, 30000, 29000)
"""Ports on which the services listen inside their containers."""
SECRETS = "/run/secrets/"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
"""Search path of the services' programs: this Python's folder first."""


class LocalStack:
    """The services of a profile, as in compose.yaml but with local hosts, ports and secrets."""

    def __init__(self, folder: Path, profile: str) -> None:
        services = read_compose(ROOT / "compose.yaml", profile, os.environ)
        self._services = [service for service in services if service.built]
        self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.secrets = folder / "secrets"
        self.address = f"127.0.0.1:{self._ports[50061]}"
        self.admin_address = f"127.0.0.1:{self._ports[50062]}"
        self.gateway = f"http://127.0.0.1:{self._ports[30000]}"

    def start(self) -> None:
        """Starts every service."""
        self.make_secrets()
        for service in self._services:
            program, *arguments = service.command
            with (self._folder / f"{service.name}.log").open("wb") as log:
                self._processes[service.name] = subprocess.Popen(
                    [shutil.which(program, path=PATH) or program, *map(self._localize, arguments)],
                    env=self._environment(service),
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def make_secrets(self) -> None:
        """Creates the secrets that do not exist yet."""
        make_secrets(self.secrets)

    def dead(self) -> list[str]:
        """Returns the services that have ended."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def stop(self) -> dict[str, int]:
        """Sends SIGTERM to the services, dependents first as Compose does, and returns their exit statuses."""
        statuses = {}
        for name, process in reversed(self._processes.items()):
            process.terminate()
            try:
                statuses[name] = process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                statuses[name] = process.wait()
        self._processes.clear()
        return statuses

    def remove(self) -> None:
        """Ends the services that still run."""
        self.stop()

    def logs(self) -> str:
        """Returns the end of every service's log."""
        paths = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in paths)

    def _environment(self, service: ComposeService) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROSTER_")}
        # Each container has port 50067 of its own; here any free port will do, as runners report theirs.
        given = {name: value.replace(":50067", ":0") for name, value in service.environment.items()}
        own = {name: self._localize(value) for name, value in given.items()}
        return inherited | {"PATH": PATH} | own

    def _localize(self, text: str) -> str:
        names = "|".join(re.escape(name) for service in self._services for name in (service.name, *service.aliases))
        text = re.sub(rf"(?<![\w.-])(?:0\.0\.0\.0|(?:{names})(?=:\d))", "127.0.0.1", text)
        text = re.sub(r"(?<![\w.])\d{5}\b", lambda port: str(self._ports.get(int(port[0]), port[0])), text)
        return text.replace(SECRETS, f"{self.secrets}/")


def make_secrets(folder: Path) -> None:
    """Runs deploy/make-secrets.sh for this folder."""
    subprocess.run([ROOT / "deploy" / "make-secrets.sh", folder], env=os.environ | {"PATH": PATH}, check=True)
