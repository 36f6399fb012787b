"""Debian's Prometheus for tests: its checker promtool, and a server on loopback with its HTTP API."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from roster_client.serve.free_ports import free_ports
from tests.support.readiness import wait_ready

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install prometheus"
)


def promtool(*arguments: str | Path) -> str:
    """Runs promtool; returns its output. Raises AssertionError with the output if it finds an error."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True, slots=True)
class Prometheus:
    """HTTP API of a server, or of a proxy in front of it."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns a query's instant vector: samples with `metric` and `value` (time, text). Raises AssertionError."""
        arguments = urllib.parse.urlencode({"query": expression})
        request = urllib.request.Request(f"{self.url}/api/v1/query?{arguments}", headers=self.headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        return result

    def has_data(self, expression: str) -> bool:
        """Whether a query has samples, none of them NaN or infinite."""
        values = [float(sample["value"][1]) for sample in self.query(expression)]
        return bool(values) and all(math.isfinite(value) for value in values)

    def value(self, expression: str) -> float:
        """Returns the only value of a query; 0 if there is none yet."""
        result = self.query(expression)
        assert len(result) <= 1, f"{expression} has {len(result)} values"
        return float(result[0]["value"][1]) if result else 0.0


def wait_for_data(server: Prometheus, queries: dict[str, str], timeout_s: float) -> None:
    """Waits until each query, given by name, has data. Raises AssertionError with the names of those without."""
    deadline = time.monotonic() + timeout_s
    empty = list(queries)
    while empty and time.monotonic() < deadline:
        time.sleep(1)
        empty = [name for name in queries if not server.has_data(queries[name])]
    assert empty == [], f"queries without data: {empty}"


@contextmanager
def prometheus(folder: Path, config: str) -> Iterator[Prometheus]:
    """Runs a server with this configuration and yields it once ready; its data is kept in the folder."""
    (port,) = free_ports(1)
    (folder / "prometheus.yml").write_text(config)
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(process, "prometheus", log, lambda: _is_ready(url))
        yield Prometheus(url)
    finally:
        process.kill()  # SIGKILL: its data is no longer needed
        process.wait()


def _is_ready(url: str) -> bool:
    """Raises URLError."""
    with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
        return True
