"""compose.yaml's services in real containers: a separate Compose project on free host ports."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from roster_client.serve.free_ports import free_ports
from tests.support.compose_file import read_compose
from tests.support.local_stack import make_secrets

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "deploy" / "wheels"
PORTS = ("ROSTER_PORT", "ROSTER_ADMIN_PORT", "ROSTER_GATEWAY_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
"""Variables of compose.yaml that name a host port."""
BUILD_S = 1800.0
STOP_S = 120.0


@dataclass(frozen=True, slots=True)
class Image:
    """An image and its size in bytes, including its base."""

    name: str
    size: int


class DockerStack:
    """Images, containers, network and volumes of a profile."""

    def __init__(self, folder: Path, profile: str) -> None:
        """Secrets are written to `folder`."""
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        # Debian's Docker has no BuildKit: use the builder that every Docker has.
        buildkit = {name: os.environ.get(name, "0") for name in ("DOCKER_BUILDKIT", "COMPOSE_DOCKER_CLI_BUILD")}
        self.secrets = folder / "secrets"
        own = {name: str(port) for name, port in ports.items()} | {"ROSTER_SECRETS": str(self.secrets)}
        own["ROSTER_DRAFT"] = "ngram"  # the dashboard has panels of drafts
        self._environment = os.environ | buildkit | own
        services = read_compose(ROOT / "compose.yaml", profile, self._environment)
        self.services = [service.name for service in services]
        self._built = [service.name for service in services if service.built]
        project = f"roster-test-{secrets.token_hex(4)}"
        self._compose = [*compose_command(), "--project-name", project, "--profile", profile]
        self.address = f"127.0.0.1:{ports['ROSTER_PORT']}"
        self.admin_address = f"127.0.0.1:{ports['ROSTER_ADMIN_PORT']}"
        self.gateway = f"http://127.0.0.1:{ports['ROSTER_GATEWAY_PORT']}"
        self.grafana = f"http://127.0.0.1:{ports['GRAFANA_PORT']}"

    def build(self) -> None:
        """Builds the images; pip settings of this machine provide a private certificate and a CPU build of torch."""
        arguments = []
        if certificate := os.environ.get("PIP_CERT"):
            arguments += ["--build-arg", f"PIP_CERT={certificate}"]
        with local_wheels():
            self._show(*self._compose, "build", *arguments, *self._built, timeout_s=BUILD_S)

    def start(self) -> None:
        """Starts every service."""
        make_secrets(self.secrets)
        self._show(*self._compose, "up", "--detach", "--no-build", timeout_s=STOP_S)

    def dead(self) -> list[str]:
        """Returns the services whose container has ended, now or earlier."""
        state = "{{.State.Running}} {{.RestartCount}}"
        return [name for name in self.services if self._inspect(name, state) != "true 0"]

    def stop(self) -> dict[str, int]:
        """Stops the containers and returns their exit statuses."""
        self._show(*self._compose, "stop", timeout_s=STOP_S)
        return {name: int(self._inspect(name, "{{.State.ExitCode}}")) for name in self.services}

    def remove(self) -> None:
        """Removes containers, network and volumes."""
        self._show(*self._compose, "down", "--volumes", "--timeout", "10", timeout_s=STOP_S)

    def execute(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command inside a service's container."""
        return self._capture("docker", "exec", self._container(service), *command)

    def health(self, service: str) -> str:
        """Returns the state of a service's health check: starting, healthy or unhealthy."""
        return self._inspect(service, "{{.State.Health.Status}}")

    def restarts(self, service: str) -> int:
        """Returns how often Docker has restarted a service's container."""
        return int(self._inspect(service, "{{.RestartCount}}"))

    def kill(self, service: str) -> None:
        """Ends a service with SIGKILL, as a crash does; after `docker kill`, Docker would not restart it."""
        number = self._inspect(service, "{{.State.Pid}}")
        helper = [
            "docker",
            "run",
            "--rm",
            "--pid",
            "host",
            "--user",
            "0",
            "--entrypoint",
            "sh",
            self._inspect("scheduler", "{{.Config.Image}}"),
        ]
        self._output(*helper, "-c", f"kill -KILL {number}")

    def images(self) -> list[Image]:
        """Returns the services' images."""
        names = [self._inspect(service, "{{.Config.Image}}") for service in self.services]
        return [Image(name, int(self._output("docker", "inspect", "--format", "{{.Size}}", name))) for name in names]

    def logs(self) -> str:
        """Returns the end of every service's log."""
        return self._capture(*self._compose, "logs", "--tail", "40").stdout

    def _container(self, service: str) -> str:
        return self._output(*self._compose, "ps", "--all", "--quiet", service)

    def _inspect(self, service: str, template: str) -> str:
        return self._output("docker", "inspect", "--format", template, self._container(service))

    def _show(self, *command: str, timeout_s: float) -> None:
        subprocess.run(command, cwd=ROOT, env=self._environment, check=True, timeout=timeout_s)

    def _output(self, *command: str) -> str:
        done = self._capture(*command)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout.strip()

    def _capture(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=60)


def compose_command() -> list[str]:
    """Returns `docker compose` if the plugin is installed, otherwise `docker-compose`.

    Raises RuntimeError if neither is installed.
    """
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise RuntimeError("Compose is not installed: install Docker's compose plugin or docker-compose")


@contextmanager
def local_wheels() -> Iterator[None]:
    """Inside the block, deploy/wheels has the torch wheels of pip's find-links folders for the image build."""
    copied = []
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in Path(folder).glob("torch-*.whl"):
            target = WHEELS / wheel.name
            if not target.exists():
                shutil.copy(wheel, target)
                copied.append(target)
    try:
        yield
    finally:
        for target in copied:
            target.unlink()
