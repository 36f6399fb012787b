"""compose.yaml's services without Docker: the same commands in the same environment, as processes on loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from roster_client.stack import free_ports
from tests.support.compose_file import ComposeService, read_compose

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 60.0


class LocalStack:
    """The services of a profile; hosts and ports become free loopback ones, all else is as compose.yaml says."""

    def __init__(self, folder: Path, profile: str) -> None:
        self._services = read_compose(ROOT / "compose.yaml", profile, os.environ)
        self._ports = dict(zip((50061, 50062, 50063), free_ports(3), strict=True))
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"127.0.0.1:{self._ports[50061]}"

    def start(self) -> None:
        """Starts every service."""
        for service in self._services:
            program, *arguments = service.command
            with (self._folder / f"{service.name}.log").open("wb") as log:
                self._processes[service.name] = subprocess.Popen(
                    [Path(sys.executable).parent / program, *map(self._localize, arguments)],
                    env=self._environment(service),
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def dead(self) -> list[str]:
        """Services that have ended."""
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
        """Ends what still runs."""
        self.stop()

    def logs(self) -> str:
        """The end of what every service printed."""
        paths = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in paths)

    def _environment(self, service: ComposeService) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROSTER_")}
        return inherited | {name: self._localize(value) for name, value in service.environment.items()}

    def _localize(self, text: str) -> str:
        hosts = "|".join([r"0\.0\.0\.0", *(re.escape(service.name) for service in self._services)])
        text = re.sub(rf"(?<![\w.])(?:{hosts})(?=:\d)", "127.0.0.1", text)
        return re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda port: str(self._ports[int(port[0])]), text)
